"""Define the papers' mixtures of training data, and the runs of published size on them."""
