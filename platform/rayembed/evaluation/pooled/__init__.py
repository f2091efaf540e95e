"""Evaluate models with a pool of workers that embed texts."""
