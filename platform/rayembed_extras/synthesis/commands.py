"""Declare the jobs of synthetic pairs and label repair for the `rayembed` command."""

from rayembed.jobs.table import DATA, Command

REPAIR = Command(
    DATA,
    "Find and repair false negatives by a reranker or a language model.",
    "rayembed_extras.synthesis.repair.job:run_repair_job",
)
SYNTHESIZE = Command(
    DATA,
    "Let a language model write training pairs: first tasks, then examples of each.",
    "rayembed_extras.synthesis.job:run_synthesis_job",
)
