"""Corpora of contextual models: documents that give the context for embedding texts."""
