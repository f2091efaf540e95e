"""Scores of models and mteb's result files that hold them."""
