"""Architectures, pooling, tokens, export. Knows no Ray, no DeepSpeed."""
