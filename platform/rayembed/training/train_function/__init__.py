"""What Ray Train runs in each worker."""
