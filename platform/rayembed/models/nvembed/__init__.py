"""NV-Embed: a decoder LLM without its causal mask, with a pooling layer (arXiv 2405.17428)."""
