"""Hardware of this machine, and background work on it."""
