"""`rayembed papers-compression` of this checkout."""

import sys

from rayembed_papers.jobs import COMPRESSION

if __name__ == "__main__":
    sys.exit(COMPRESSION(sys.argv[1:]))
