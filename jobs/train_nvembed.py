"""Train NV-Embed in two stages, evaluate it and register it in MLflow."""

import sys

from rayembed.pipeline.run.training_job import training_job

if __name__ == "__main__":
    sys.exit(training_job("nvembed-quickstart")(sys.argv[1:], about=__doc__))
