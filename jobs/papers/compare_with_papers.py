"""`rayembed papers-published` of this checkout."""

import sys

from rayembed_papers.jobs import PUBLISHED

if __name__ == "__main__":
    sys.exit(PUBLISHED(sys.argv[1:]))
