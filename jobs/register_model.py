"""Register a model with its scores in MLflow, make it champion by gates, or roll back."""

import sys

from rayembed.pipeline.register_job import run_register_job

if __name__ == "__main__":
    sys.exit(run_register_job(sys.argv[1:], about=__doc__))
