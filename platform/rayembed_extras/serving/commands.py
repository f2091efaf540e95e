"""Declare the serving job for the `rayembed` command."""

from rayembed.jobs.table import SERVE, Command

SERVER = Command(
    SERVE,
    "Serve models at the paths of OpenAI, Text Embeddings Inference and Cohere.",
    "rayembed_extras.serving.job:run_serve_job",
)
