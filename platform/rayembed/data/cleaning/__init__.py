"""What is taken out of converted rows: near-duplicates, texts of benchmarks."""
