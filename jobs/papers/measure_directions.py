"""Measure at a small size what the papers find better than what, and tell which of it holds."""

import sys

from rayembed_papers.directions.job import run_directions

if __name__ == "__main__":
    sys.exit(run_directions(sys.argv[1:], about=__doc__))
