"""Put similar pairs into batches: contextual clusters."""

import sys

from rayembed.pipeline.data_jobs import run_data_job

if __name__ == "__main__":
    sys.exit(run_data_job(sys.argv[1:], until="clustered", about=__doc__))
