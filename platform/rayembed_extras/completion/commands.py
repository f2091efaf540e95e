"""Declare the job that prints completion scripts for the `rayembed` command."""

from rayembed.jobs.table import SERVE, Command

COMPLETION = Command(
    SERVE,
    "Print a script that completes this command in a shell.",
    "rayembed_extras.completion.completion:print_completion",
)
