"""Data preparation jobs."""
