"""`rayembed papers-tables` of this checkout."""

import sys

from rayembed_papers.jobs import TABLES

if __name__ == "__main__":
    sys.exit(TABLES(sys.argv[1:]))
