"""The proof in a model folder: texts and their right vectors, by which any copy is checked."""
