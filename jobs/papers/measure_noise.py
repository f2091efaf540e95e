"""Measure how much unrelated text behind every text lowers models' scores (Causal2Vec, Table 3)."""

import sys

from rayembed_papers.noise.job import run_noise_job

if __name__ == "__main__":
    sys.exit(run_noise_job(sys.argv[1:], about=__doc__))
