"""Exact top-k search; serves mining, filtering and evaluation alike."""
