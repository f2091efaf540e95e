"""Score a model on benchmarks over the cluster, with mteb's own tasks, scores and result files."""

import sys

from rayembed.pipeline.evaluation_job import run_evaluation_job

if __name__ == "__main__":
    sys.exit(run_evaluation_job(sys.argv[1:], about=__doc__))
