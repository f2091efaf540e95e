"""Which failures of a training run are tried again, and what is told of the others."""
