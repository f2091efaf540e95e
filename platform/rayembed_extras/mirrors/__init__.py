"""Copy a run's training curves to TensorBoard and Weights & Biases."""
