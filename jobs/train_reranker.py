"""`rayembed train-reranker` of this checkout."""

import sys

from rayembed.jobs.table import JOBS

if __name__ == "__main__":
    sys.exit(JOBS.get("train-reranker")(sys.argv[1:]))
