"""The quickstart: trains, evaluates and registers a small model on this machine.

Its first argument may name the family (nvembed, causal2vec, cde or nomic; the first one where none
is named), the others are those of the training job.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rayembed.config.run import Run
from rayembed.pipeline.job import JobContext
from rayembed.pipeline.on_ray import run_on_local_head
from rayembed.pipeline.training_job import training_job

FAMILIES = ("nvembed", "causal2vec", "cde", "nomic")
"""Families that can be trained; the first one is the default."""

STORAGE = "placement.storage_path="

CHECKOUT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str]) -> int:
    """The exit code of the training job, which is submitted to a Ray head of this machine."""
    family, *others = argv if argv and argv[0] in FAMILIES else (FAMILIES[0], *argv)
    recipe = f"{family}-quickstart"
    arguments = others
    if not any(word.removeprefix("--set=").startswith(STORAGE) for word in others):
        # A job runs in a copy of the checkout, which is gone afterwards: the results go here.
        arguments = ["--set", f"{STORAGE}{CHECKOUT / 'outputs'}", *others]

    def submit(_run: Run, context: JobContext) -> int:
        def echo(text: str) -> None:
            with suppress(OSError):  # of a terminal that is gone: the job is still to be stopped
                print(text, end="", flush=True, file=context.out)

        entrypoint = [sys.executable, f"jobs/train_{family}.py", "--recipe", recipe, *arguments]
        return run_on_local_head(entrypoint, checkout=CHECKOUT, echo=echo)

    return replace(training_job(recipe), run=submit)(arguments, about=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
