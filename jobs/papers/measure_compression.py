"""Measure pruning, recovery and quantisation as NV-Embed's Tables 6 to 8 do, at a small size."""

import sys

from rayembed_papers.compression.job import run_compression_tables

if __name__ == "__main__":
    sys.exit(run_compression_tables(sys.argv[1:], about=__doc__))
