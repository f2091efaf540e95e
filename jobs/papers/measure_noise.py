"""`rayembed papers-noise` of this checkout."""

import sys

from rayembed_papers.jobs import NOISE

if __name__ == "__main__":
    sys.exit(NOISE(sys.argv[1:]))
