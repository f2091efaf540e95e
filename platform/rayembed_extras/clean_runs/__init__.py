"""What lies in a storage, and what of it may go: runs, sweeps, data, MLflow's entries."""
