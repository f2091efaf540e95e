"""Keep the pairs whose document a weak model finds by itself (consistency filter)."""

import sys

from rayembed.pipeline.data_jobs import data_job

if __name__ == "__main__":
    sys.exit(data_job("filtered")(sys.argv[1:], about=__doc__))
