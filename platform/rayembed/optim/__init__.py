"""Optimisers and learning-rate schedules, each in one file with its settings."""
