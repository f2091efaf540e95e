"""Declare the jobs that compress models for the `rayembed` command."""

from rayembed.jobs.table import SERVE, TRAIN, Command

SIZES = Command(
    TRAIN,
    "Make smaller sizes of a trained model: fewer layers or tokens, distilled.",
    "rayembed_extras.compression.sizes_job:run_sizes_job",
)
COMPRESS = Command(
    SERVE,
    "Compress a model in several ways, and compare size, speed and scores.",
    "rayembed_extras.compression.job:run_compression_job",
)
