"""Command `rayembed JOB`: start a job by its name, or list all jobs."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rayembed.errors import ConfigError
from rayembed.jobs.table import DATA, EVALUATE, JOBS, SERVE, TRAIN


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the arguments name, and return its exit code; 2 for a missing or unknown
    name.

    Args:
        argv: the job's name and its arguments; None: those of this process.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    name = words[0] if words else None
    if name == "--version":
        from rayembed import __version__

        sys.stdout.write(f"rayembed {__version__}\n")
        return 0
    if name in (None, "-h", "--help"):
        (sys.stdout if name else sys.stderr).write(_listed())
        return 0 if name else 2
    from rayembed.pipeline.job import check_no_credentials

    try:
        check_no_credentials(words)  # the message of an unknown job repeats its name
        command = JOBS.get(words[0])
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return command(words[1:], prog=f"{_program()} {words[0]}")


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "python -m rayembed" if name == "__main__.py" else name


def _listed() -> str:
    """Help text that lists all jobs by name, one on each line, under group headings."""
    jobs = dict(sorted(JOBS.members().items()))
    width = max(map(len, jobs))
    groups = dict.fromkeys([TRAIN, DATA, EVALUATE, SERVE, *(each.group for each in jobs.values())])
    lines = [
        f"usage: {_program()} JOB [options]\n",
        "Train, evaluate, register and serve text-embedding models, in one process or on Ray.",
    ]
    for group in groups:
        rows = [(name, each.summary) for name, each in jobs.items() if each.group == group]
        lines += [f"\n{group}:", *(f"  {name:{width}}  {what}" for name, what in rows)]
    lines.append(f"\n{_program()} JOB --help has the options of a job.")
    return "\n".join(lines) + "\n"
