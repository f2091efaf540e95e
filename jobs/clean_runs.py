"""List what lies in a storage (runs, data, MLflow's entries, with bytes), and free it."""

import sys

from rayembed.pipeline.cleaning.job import run_clean_job

if __name__ == "__main__":
    sys.exit(run_clean_job(sys.argv[1:], about=__doc__))
