"""Scores of a stage's weights while it is trained, and what is decided by them."""
