"""Time, memory and sizes of a run before it starts, counted from the shapes of its models."""
