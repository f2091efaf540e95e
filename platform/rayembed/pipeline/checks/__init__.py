"""Checks before a run starts, grouped by what they need: files, the network, a model."""
