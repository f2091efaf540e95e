"""Compare models by their results: tables, plots, differences from a baseline."""

import sys

from rayembed.pipeline.compare_job import run_compare_job

if __name__ == "__main__":
    sys.exit(run_compare_job(sys.argv[1:], about=__doc__))
