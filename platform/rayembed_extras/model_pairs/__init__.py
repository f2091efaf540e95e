"""Evaluate two models as one, which embed queries and documents into the same space, and train such
models.
"""
