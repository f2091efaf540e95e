"""Data sets of the papers, and their locations."""
