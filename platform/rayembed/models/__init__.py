"""Architectures, pooling, tokens, export. Independent of Ray and DeepSpeed."""
