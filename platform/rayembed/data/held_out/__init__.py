"""Held-out parts of data sets: choosing rows, storing them as records, and writing retrieval sets
to score.
"""
