"""Merge trained models of one architecture, such as a base and its fine-tuned model, into one."""

import sys

from rayembed.pipeline.merge_job import run_merge_job

if __name__ == "__main__":
    sys.exit(run_merge_job(sys.argv[1:], about=__doc__))
