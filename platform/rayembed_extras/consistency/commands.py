"""Declare the consistency filter's job for the `rayembed` command."""

from rayembed.jobs.table import DATA, Command

FILTER = Command(
    DATA,
    "Keep the pairs whose document a weak model finds by itself (consistency).",
    "rayembed_extras.consistency.job:run_filter_job",
)
