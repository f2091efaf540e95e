"""`rayembed papers-directions` of this checkout."""

import sys

from rayembed_papers.jobs import DIRECTIONS

if __name__ == "__main__":
    sys.exit(DIRECTIONS(sys.argv[1:]))
