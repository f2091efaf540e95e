"""Jobs of completion, as `rayembed` lists them."""

from rayembed.jobs.table import SERVE, Command

COMPLETION = Command(
    SERVE,
    "Print a script that completes this command in a shell.",
    "rayembed_extras.completion.completion:print_completion",
)
