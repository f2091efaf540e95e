"""Scores printed in papers, as data files: one file for each paper, one row for each score."""
