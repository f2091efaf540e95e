"""Jobs of corpora, as `rayembed` lists them."""

from rayembed.jobs.table import SERVE, Command

CORPUS = Command(
    SERVE,
    "Give a CDE model a corpus: some documents, embedded once, saved with it.",
    "rayembed_extras.corpora.job:run_corpus_job",
)
