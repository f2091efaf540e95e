"""Implement `rayembed completion SHELL`, which completes job names, options and recipe names."""

import argparse
import sys
from collections.abc import Sequence

from rayembed.config.table import load
from rayembed.errors import require_packages
from rayembed.jobs.table import JOBS
from rayembed.pipeline.job import Job


def print_completion(
    argv: Sequence[str], *, about: str | None = None, prog: str | None = None
) -> int:
    """Print the completion script of a shell; return exit code 0."""
    require_packages("rayembed completion", "completion", "shtab")
    import shtab

    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    shell = parser.parse_args(argv).shell
    sys.stdout.write(f"{shtab.complete(_all_jobs(), shell)}\n")
    return 0


def _all_jobs() -> argparse.ArgumentParser:
    """Build a parser with the options of every job, only to describe them to the completion
    generator.
    """
    from shtab import Required

    parser = argparse.ArgumentParser(prog="rayembed")
    jobs = parser.add_subparsers()
    for name, command in JOBS.members().items():
        described = jobs.add_parser(name, help=command.summary)
        job = load(command.job)
        for each in job.all_options if isinstance(job, Job) else ():
            offered = tuple(each.names()) if each.names else ()
            choices = {"choices": [*offered, *Required.FILE]} if offered else {}
            described.add_argument(each.flag, **{**each.arguments, **choices})
    return parser
