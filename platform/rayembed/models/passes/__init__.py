"""Inference passes of a model over many texts."""
