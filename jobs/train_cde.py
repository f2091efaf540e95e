"""Train CDE, evaluate it and register it in MLflow.

The default is a run for a laptop (all-MiniLM in both stages, Wikipedia summaries); `--list` shows
others.
"""

import sys

from rayembed.pipeline.command_line import run_job

if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], default_recipe="cde-quickstart", about=__doc__))
