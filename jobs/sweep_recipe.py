"""Search the settings of a recipe over the cluster."""

import sys

from rayembed.pipeline.sweep_job import run_sweep_job

if __name__ == "__main__":
    sys.exit(run_sweep_job(sys.argv[1:], about=__doc__))
