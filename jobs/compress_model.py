"""`rayembed compress` of this checkout."""

import sys

from rayembed.jobs.table import JOBS

if __name__ == "__main__":
    sys.exit(JOBS.get("compress")(sys.argv[1:]))
