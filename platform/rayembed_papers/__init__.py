"""What reproduces the papers with rayembed: their tables, their figures, their benchmarks."""
