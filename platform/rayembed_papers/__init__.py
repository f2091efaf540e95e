"""Reproduction of the papers with rayembed: their tables, their figures, their benchmarks."""
