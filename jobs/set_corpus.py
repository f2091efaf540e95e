"""Give a CDE model a corpus: some of its documents, embedded once, saved with the model."""

import sys

from rayembed.pipeline.corpus_job import run_corpus_job

if __name__ == "__main__":
    sys.exit(run_corpus_job(sys.argv[1:], about=__doc__))
