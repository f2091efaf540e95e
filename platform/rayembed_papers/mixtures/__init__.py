"""Mixtures of training data of the papers, and the runs of published size on them."""
