"""Score models that mteb or sentence-transformers load, with those libraries' own code."""
