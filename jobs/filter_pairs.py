"""Keep the pairs whose document a weak model finds by itself (consistency filter)."""

import sys

from rayembed.pipeline.data_jobs import run_data_job

if __name__ == "__main__":
    sys.exit(run_data_job(sys.argv[1:], until="filtered", about=__doc__))
