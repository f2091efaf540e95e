"""Cleaning of converted rows: near-duplicates and benchmark texts are removed."""
