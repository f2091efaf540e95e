"""Cleaning of converted rows: removes duplicates and texts of benchmarks."""
