"""Causal2Vec: a causal LLM that reads a text after a Contextual token (arXiv 2507.23386)."""
