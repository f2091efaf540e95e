"""Estimate time, memory and sizes of a run before it starts, from the shapes of its models."""
