"""Declare the sweep job for the `rayembed` command."""

from rayembed.jobs.table import TRAIN, Command

SWEEP = Command(
    TRAIN,
    "Search the settings of a recipe over the cluster.",
    "rayembed_extras.sweeps.job:run_sweep_job",
)
