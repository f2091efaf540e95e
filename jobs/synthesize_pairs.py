"""Let a language model write training pairs: first tasks, then examples of each."""

import sys

from rayembed.pipeline.synthesis_job import run_synthesis_job

if __name__ == "__main__":
    sys.exit(run_synthesis_job(sys.argv[1:], about=__doc__))
