"""Analyses of CDE: the gain by context documents, and the difficulty of its batches."""
