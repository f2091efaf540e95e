"""Save models to folders, also in the format of sentence-transformers, and merge models."""
