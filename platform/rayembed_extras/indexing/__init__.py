"""Embed a corpus into a vector store, keep it current, and measure what the store returns."""
