"""Losses, each one file: its settings and a pure function of embeddings. They know no process
groups.
"""
