"""What this machine has, and work done ahead on it."""
