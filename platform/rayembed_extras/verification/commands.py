"""Jobs of verification, as `rayembed` lists them."""

from rayembed.jobs.table import SERVE, Command

VERIFY = Command(
    SERVE,
    "Check that a server or file gives the vectors of a model; names the mistake.\n\n"
    "TARGET is an address (OpenAI's, Text Embeddings Inference's or Cohere's schema), a model "
    "folder, a GGUF file or a registered version. Exit code 0: the same vectors; 3: others.",
    "rayembed_extras.verification.job:run_verify_job",
)
