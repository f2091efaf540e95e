"""Training: the step, the loop, the DeepSpeed engine, checkpoints."""
