"""Copies of a run's curves in TensorBoard and Weights & Biases."""
