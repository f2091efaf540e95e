"""Finished models made smaller or faster: pruned, quantised, cut, or written for a runtime."""
