"""Handling of workers that hang, fail or lose their node."""
