"""The function that Ray Train runs in each worker."""
