"""Training of a model: the step, the loop, the DeepSpeed engine, checkpoints."""
