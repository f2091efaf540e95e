"""Sweeps: search settings by many training runs (trials), and compare the results."""
