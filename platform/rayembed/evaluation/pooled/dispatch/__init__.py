"""Calls of tasks, given to workers that hold the model."""
