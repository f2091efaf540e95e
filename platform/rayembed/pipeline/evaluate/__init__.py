"""Evaluate models, and let the guard choose among a run's models."""
