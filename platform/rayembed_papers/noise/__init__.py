"""Measure how much scores fall when unrelated text is appended to every text (Causal2Vec,
Table 3).
"""
