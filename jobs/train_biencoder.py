"""Train a bi-encoder on one's own pairs or on Wikipedia, evaluate it and register it in MLflow."""

import sys

from rayembed.pipeline.command_line import run_job

if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], default_recipe="biencoder-quickstart", about=__doc__))
