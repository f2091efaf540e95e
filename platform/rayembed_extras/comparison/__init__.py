"""Models side by side on a benchmark."""
