"""Jobs of the storage clean-up, as `rayembed` lists them."""

from rayembed.jobs.table import SERVE, Command

CLEAN = Command(
    SERVE,
    "List what a storage holds (runs, data, MLflow's entries, bytes), and free it.",
    "rayembed_extras.clean_runs.job:run_clean_job",
)
