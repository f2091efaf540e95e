"""Evaluation through mteb: scores in mteb's result format, and tables of them."""
