"""`rayembed index-scores` of this checkout."""

import sys

from rayembed.jobs.table import JOBS

if __name__ == "__main__":
    sys.exit(JOBS.get("index-scores")(sys.argv[1:]))
