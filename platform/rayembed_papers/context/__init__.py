"""Analyses of CDE: the gain from context documents, and the difficulty of its batches."""
