"""The papers' claims of what is better than what, measured again at a small size."""
