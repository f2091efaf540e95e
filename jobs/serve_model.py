"""Serve models at the paths of OpenAI, Text Embeddings Inference and Cohere, on Ray Serve."""

import sys

from rayembed.pipeline.serve_job import run_serve_job

if __name__ == "__main__":
    sys.exit(run_serve_job(sys.argv[1:], about=__doc__))
