"""Serve a registered model at OpenAI's path /v1/embeddings, on Ray Serve, with batching."""

import sys

from rayembed.pipeline.serve_job import run_serve_job

if __name__ == "__main__":
    sys.exit(run_serve_job(sys.argv[1:], about=__doc__))
