"""`rayembed papers-context` of this checkout."""

import sys

from rayembed_papers.jobs import CONTEXT

if __name__ == "__main__":
    sys.exit(CONTEXT(sys.argv[1:]))
