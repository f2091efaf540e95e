"""Train CDE, evaluate it and register it in MLflow.

The default is a run for a laptop (all-MiniLM in both stages, Wikipedia summaries); `--list` shows
others.
"""

import sys

from rayembed.pipeline.run.training_job import training_job

if __name__ == "__main__":
    sys.exit(training_job("cde-quickstart")(sys.argv[1:], about=__doc__))
