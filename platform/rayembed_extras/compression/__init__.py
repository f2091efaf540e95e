"""Make trained models smaller or faster: prune, quantise, cut, or export them for a runtime."""
