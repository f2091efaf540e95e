"""`rayembed synthesize` of this checkout."""

import sys

from rayembed.jobs.table import JOBS

if __name__ == "__main__":
    sys.exit(JOBS.get("synthesize")(sys.argv[1:]))
