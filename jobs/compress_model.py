"""Compress a model in several ways, and set the variants side by side: size, speed, scores."""

import sys

from rayembed.pipeline.compression_job import run_compression_job

if __name__ == "__main__":
    sys.exit(run_compression_job(sys.argv[1:], about=__doc__))
