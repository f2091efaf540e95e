"""Checks before a run starts, by what they need: files, the network, a model."""
