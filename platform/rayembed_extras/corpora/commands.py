"""Declare the job that gives models a corpus for the `rayembed` command."""

from rayembed.jobs.table import SERVE, Command

CORPUS = Command(
    SERVE,
    "Give a CDE model a corpus: some documents, embedded once, saved with it.",
    "rayembed_extras.corpora.job:run_corpus_job",
)
