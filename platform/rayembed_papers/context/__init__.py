"""Analyse CDE: the gain from context documents, and the difficulty of clustered batches."""
