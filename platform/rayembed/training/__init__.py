"""The step, the loop, the DeepSpeed engine, checkpoints."""
