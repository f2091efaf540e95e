"""Declare the job that embeds a corpus into a vector store for the `rayembed` command."""

from rayembed.jobs.table import SERVE, Command

INDEX = Command(
    SERVE,
    "Embed documents into a vector store, or bring the store up to date.\n\n"
    "Reads files of rows or texts, divides documents into pieces where asked, embeds them and "
    "writes them to Parquet, LanceDB, PostgreSQL, Qdrant or FAISS. A job that was killed goes on "
    "by the same command; --update embeds only what is new or changed and deletes what is gone.",
    "rayembed_extras.indexing.job:run_index_job",
)
