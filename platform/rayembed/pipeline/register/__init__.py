"""Register models in MLflow, with scores and a model card."""
