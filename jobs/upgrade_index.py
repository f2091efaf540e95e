"""`rayembed upgrade` of this checkout."""

import sys

from rayembed.jobs.table import JOBS

if __name__ == "__main__":
    sys.exit(JOBS.get("upgrade")(sys.argv[1:]))
