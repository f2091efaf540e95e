"""Scores printed in papers, as data files: one file for each paper, one line for each score."""
