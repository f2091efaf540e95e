"""Registration of a model."""
