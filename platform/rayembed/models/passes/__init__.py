"""Passes of a model over many texts, without gradient."""
