"""Embedding models: architectures, pooling, tokenizers, loading and saving. Independent of Ray and
DeepSpeed.
"""
