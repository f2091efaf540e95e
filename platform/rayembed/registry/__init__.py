"""Track runs in MLflow, register models, and write model cards with provenance."""
