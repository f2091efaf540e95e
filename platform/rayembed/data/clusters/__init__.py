"""Batches of similar pairs: paired k-means, packing, false-negative masks."""
