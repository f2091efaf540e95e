"""Held-out parts of data sets: chosen, kept as records, and laid out as retrieval sets."""
