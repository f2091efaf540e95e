"""Search and early stopping: which trial is next, and which one ends."""
