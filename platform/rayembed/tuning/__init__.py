"""Trials of a sweep: what they are, who runs them, what came of them."""
