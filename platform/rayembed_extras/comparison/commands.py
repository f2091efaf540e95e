"""Declare the job that compares models for the `rayembed` command."""

from rayembed.jobs.table import EVALUATE, Command

COMPARE = Command(
    EVALUATE,
    "Compare models by their results: tables, plots, differences from a baseline.",
    "rayembed_extras.comparison.job:run_compare_job",
)
