"""Pipeline from a resolved run to a registered model."""
