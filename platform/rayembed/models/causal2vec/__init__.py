"""Causal2Vec: a causal LLM whose input contains Contextual tokens, which an encoder computes from
the whole text (arXiv 2507.23386).
"""
