"""Nomic Embed v2: a mixture-of-experts encoder with rotary positions (arXiv 2502.07972)."""
