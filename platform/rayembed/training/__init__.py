"""The training step, the loop, the DeepSpeed engine, checkpoints."""
