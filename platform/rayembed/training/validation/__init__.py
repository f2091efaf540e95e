"""Validation of a stage's weights during training, and decisions based on the scores."""
