"""Failure handling: which failures of a training run are retried, and how others are reported."""
