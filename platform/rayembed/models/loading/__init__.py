"""Loading and building of models from folders and settings."""
