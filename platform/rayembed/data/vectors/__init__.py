"""Vectors that teacher models give to texts: loading teachers, embedding, and files that later runs
reuse.
"""
