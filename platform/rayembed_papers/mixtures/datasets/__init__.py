"""Data sets of the papers, and where their rows are published."""
