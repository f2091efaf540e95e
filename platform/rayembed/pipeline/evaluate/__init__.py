"""Evaluations and the guard: models scored, and one of several chosen."""
