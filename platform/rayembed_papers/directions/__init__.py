"""Measure the papers' claims about better methods again at a small size."""
