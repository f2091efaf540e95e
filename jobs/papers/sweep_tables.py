"""Measure a table of a paper as a sweep over the cluster."""

import sys

from rayembed.pipeline.sweep_job import sweep_job
from rayembed_papers.tables.catalogue import table_sweeps

if __name__ == "__main__":
    sys.exit(sweep_job(table_sweeps())(sys.argv[1:], about=__doc__))
