"""MLflow tracking, model registration, model card, provenance."""
