"""Compare models on a benchmark."""
