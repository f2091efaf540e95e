"""The way of a model into the registry."""
