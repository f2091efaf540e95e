"""Jobs of comparisons, as `rayembed` lists them."""

from rayembed.jobs.table import EVALUATE, Command

COMPARE = Command(
    EVALUATE,
    "Compare models by their results: tables, plots, differences from a baseline.",
    "rayembed_extras.comparison.job:run_compare_job",
)
