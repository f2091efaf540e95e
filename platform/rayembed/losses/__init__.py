"""Losses, each in one file with its settings and a pure function of embeddings. They know no
process groups.
"""
