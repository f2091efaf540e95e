"""Time, memory and sizes of a run before it starts."""
