"""Find false negatives among hard ones by a reranker or a language model, and repair them."""

import sys

from rayembed.pipeline.data_jobs import data_job

if __name__ == "__main__":
    sys.exit(data_job("repaired")(sys.argv[1:], about=__doc__))
