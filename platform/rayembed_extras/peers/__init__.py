"""Models that mteb or sentence-transformers loads, to be scored as others have them."""
