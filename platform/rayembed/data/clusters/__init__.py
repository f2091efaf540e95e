"""Batches of similar pairs: k-means over query-document pairs, packing into batches, masks of false
negatives.
"""
