"""Declare the jobs of indexes for the `rayembed` command."""

from rayembed.jobs.table import EVALUATE, SERVE, Command

INDEX = Command(
    SERVE,
    "Embed documents into a vector store, or bring the store up to date.\n\n"
    "Reads files of rows or texts, divides documents into pieces where asked, embeds them and "
    "writes them to Parquet, LanceDB, PostgreSQL, Qdrant or FAISS. A job that was killed goes on "
    "by the same command; --update embeds only what is new or changed and deletes what is gone.",
    "rayembed_extras.indexing.job:run_index_job",
)

SCORES = Command(
    EVALUATE,
    "Measure what the store of an index returns: recall, nDCG, latency, size.\n\n"
    "Compares the store's search with exact search over the same vectors, by number type, index "
    "and settings of a search, and scores judged queries through it.",
    "rayembed_extras.indexing.scores_job:run_scores_job",
)
