"""`rayembed index` of this checkout."""

import sys

from rayembed.jobs.table import JOBS

if __name__ == "__main__":
    sys.exit(JOBS.get("index")(sys.argv[1:]))
