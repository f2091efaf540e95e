"""Checkpoints of a stage, its trained weights, and the model exported from them."""
