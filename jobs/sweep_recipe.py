"""Search the settings of a recipe over the cluster."""

import sys

from rayembed.pipeline.sweep_job import sweep_job

if __name__ == "__main__":
    sys.exit(sweep_job()(sys.argv[1:], about=__doc__))
