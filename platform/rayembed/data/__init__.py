"""Records, sources, converters, mining, the batch plan and its stream."""
