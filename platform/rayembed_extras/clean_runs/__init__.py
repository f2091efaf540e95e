"""List the contents of a storage, and remove runs, sweeps, data and MLflow entries."""
