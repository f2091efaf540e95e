"""Declare the job that merges models for the `rayembed` command."""

from rayembed.jobs.table import TRAIN, Command

MERGE = Command(
    TRAIN,
    "Merge trained models of one architecture, such as a base and its fine-tune.",
    "rayembed_extras.merging.job:run_merge_job",
)
