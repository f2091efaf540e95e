"""The end of a training that is stopped."""
