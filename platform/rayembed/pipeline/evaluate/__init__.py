"""Evaluation of models, and the guard that chooses among them."""
