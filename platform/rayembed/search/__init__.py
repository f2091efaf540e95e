"""Exact top-k search for mining, filtering and evaluation."""
