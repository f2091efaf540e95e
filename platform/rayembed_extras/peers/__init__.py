"""Models loaded by mteb or sentence-transformers, scored with those libraries' own code."""
