"""MLflow's own functions at a store for a while.

`mlflow.set_tracking_uri` writes MLFLOW_TRACKING_URI too, which later tests of the process, and all
that they start, would take for the user's.
"""

from contextlib import contextmanager


@contextmanager
def mlflow_at(uri):
    """Runs and registered models are those of the store at the address."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)
