"""Cleaning of converted rows: duplicates and benchmark texts are removed."""
