"""Show which rows of which sources a training step is made of, and what was done with them."""

import sys

from rayembed.pipeline.batch_trace import run_trace

if __name__ == "__main__":
    sys.exit(run_trace(sys.argv[1:], about=__doc__))
