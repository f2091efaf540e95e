"""Scores of models, and mteb's result files that store them."""
