"""Adapt a bi-encoder to documents without a label: from a corpus to a scored, registered model.

Each document gives a pair by its structure (title and body, heading and section, sentence and
rest), or a language model behind an endpoint writes its query. A teacher filters these and mines
hard negatives, and its scores are distilled.
"""

import sys

from rayembed.pipeline.training_job import training_job

if __name__ == "__main__":
    sys.exit(training_job("biencoder-corpus")(sys.argv[1:], about=__doc__))
