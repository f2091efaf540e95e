"""Declare the job that cleans a storage for the `rayembed` command."""

from rayembed.jobs.table import SERVE, Command

CLEAN = Command(
    SERVE,
    "List what a storage holds (runs, data, MLflow's entries, bytes), and free it.",
    "rayembed_extras.clean_runs.job:run_clean_job",
)
