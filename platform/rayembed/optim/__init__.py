"""Optimisers and schedules of the learning rate, each one file with its settings."""
