"""Compare models by their results with the figures that the papers print."""

import sys

from rayembed_papers.published.job import run_comparison_with_papers

if __name__ == "__main__":
    sys.exit(run_comparison_with_papers(sys.argv[1:], about=__doc__))
