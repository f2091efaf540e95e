"""Model folders: written, merged, cut, in the format of sentence-transformers."""
