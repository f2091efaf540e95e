"""Jobs of serving, as `rayembed` lists them."""

from rayembed.jobs.table import SERVE, Command

SERVER = Command(
    SERVE,
    "Serve models at the paths of OpenAI, Text Embeddings Inference and Cohere.",
    "rayembed_extras.serving.job:run_serve_job",
)
