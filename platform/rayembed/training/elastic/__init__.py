"""Training with a number of workers that follows the nodes of the cluster."""
