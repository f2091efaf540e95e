"""Models from folders and from settings."""
