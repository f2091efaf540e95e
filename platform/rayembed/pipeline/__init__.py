"""Steps from a run's settings to a registered model."""
