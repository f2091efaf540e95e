"""Reference of all commands, as Markdown: what `--help` of each prints."""

import os
from contextlib import redirect_stdout, suppress
from io import StringIO

from rayembed.jobs.table import JOBS


def page() -> str:
    """Markdown of `reference/commands.md`."""
    os.environ["COLUMNS"] = "100"  # argparse breaks its lines there
    groups: dict[str, list[str]] = {}
    for name, command in JOBS.members().items():
        text = StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            command(["--help"], prog=f"rayembed {name}")
        section = [
            f"### `rayembed {name}` {{#{name}}}",
            "",
            "```text",
            text.getvalue().strip(),
            "```",
        ]
        groups.setdefault(command.group, []).append("\n".join(section))
    lines = [
        "# Commands",
        "",
        "`rayembed --help` lists these jobs, and `rayembed JOB --help` prints what follows. Exit"
        " codes: 0 done, 1 failed, 2 invalid input (nothing was started), 130, 143 or 129 stopped"
        " by SIGINT, SIGTERM or SIGHUP.",
    ]
    for group, sections in groups.items():
        lines += [f"## {group.capitalize()}", *sections]
    return "\n\n".join(lines) + "\n"
