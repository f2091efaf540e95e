"""Data sets of the papers, their locations, and data recipes made from them."""
