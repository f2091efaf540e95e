"""Measure what CDE's batches and context do: sizes of clusters, number of documents, topics."""

import sys

from rayembed_papers.context.job import run_context_job

if __name__ == "__main__":
    sys.exit(run_context_job(sys.argv[1:], about=__doc__))
