"""Queries whose scores changed between two models, with likely causes, and texts that are cut."""
