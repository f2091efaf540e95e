"""Saving of models: folders, merging, cutting, the format of sentence-transformers."""
