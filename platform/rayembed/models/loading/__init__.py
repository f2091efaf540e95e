"""Load models from folders, and build them from settings."""
