"""The quickstart: trains, evaluates and registers a small model on this machine.

Usage: python jobs/run_quickstart.py [nvembed|causal2vec|cde|nomic] [arguments of the training job]
"""

import logging
import subprocess
import sys
from pathlib import Path

from rayembed.errors import RayembedError
from rayembed.pipeline.on_ray import run_on_local_head

FAMILIES = ("nvembed", "causal2vec", "cde", "nomic")
"""What can be trained; the first one where none is named."""

STARTS_NOTHING = {"-h", "--help", "--list", "--dry-run"}
"""Arguments of a training job that need no Ray."""


def main(arguments: list[str]) -> int:
    """The exit code of the training job."""
    family = FAMILIES[0]
    if arguments and arguments[0] in FAMILIES:
        family, *arguments = arguments
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    checkout = Path(__file__).resolve().parent.parent
    job, recipe = f"jobs/train_{family}.py", f"{family}-quickstart"
    entrypoint = [sys.executable, job, "--recipe", recipe]
    # A job runs in a copy of the checkout, which is gone afterwards: the results go here.
    entrypoint += ["--set", f"placement.storage_path={checkout / 'outputs'}", *arguments]
    if not STARTS_NOTHING.isdisjoint(arguments):
        return subprocess.run(entrypoint, cwd=checkout, check=False).returncode

    def echo(text: str) -> None:
        print(text, end="", flush=True)

    try:
        return run_on_local_head(entrypoint, checkout=checkout, echo=echo)
    except RayembedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
