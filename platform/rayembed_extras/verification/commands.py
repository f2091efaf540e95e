"""Declare the verification job for the `rayembed` command."""

from rayembed.jobs.table import SERVE, Command

VERIFY = Command(
    SERVE,
    "Check by a model's proof that a server or folder gives its vectors.\n\n"
    "TARGET is an address (OpenAI's, Text Embeddings Inference's or Cohere's schema), a model "
    "folder, a GGUF or ONNX file or a registered version. Exit code 0: the same vectors; 3: "
    "others.",
    "rayembed_extras.verification.job:run_verify_job",
)
