"""Scores printed in papers, as data: one file a paper, one line a score."""
