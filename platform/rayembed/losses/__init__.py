"""Losses as pure functions of embeddings. Independent of process groups."""
