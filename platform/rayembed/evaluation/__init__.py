"""Evaluate models with mteb: scores in mteb's result format, and tables of them."""
