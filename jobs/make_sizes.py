"""Make smaller sizes of a trained model: fewer layers or tokens, distilled from the whole."""

import sys

from rayembed.pipeline.sizes_job import run_sizes_job

if __name__ == "__main__":
    sys.exit(run_sizes_job(sys.argv[1:], about=__doc__))
