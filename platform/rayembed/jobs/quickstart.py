"""The quickstart: a small recipe of a family, on a Ray of this machine where a checkout is."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import rayembed
from rayembed.config.run import Run
from rayembed.pipeline.job import JobContext
from rayembed.pipeline.run.on_ray import RUNTIME_ENV, run_on_local_head
from rayembed.pipeline.run.training_job import training_job

FAMILIES = ("nvembed", "causal2vec", "cde", "nomic")
"""Families that can be trained; the first one is the default."""

STORAGE = "placement.storage_path="

CHECKOUT = Path(rayembed.__file__).resolve().parents[2]
"""Folder of `platform/`, `jobs/` and `cluster/`, unless the package is installed without them."""


def quickstart(argv: Sequence[str], *, about: str | None = None, prog: str | None = None) -> int:
    """The exit code of the training job.

    In a checkout it is submitted to a Ray head of this machine, as it would be to a cluster; an
    installed package has no working directory to submit, and trains in this process.
    """
    family, *others = argv if argv and argv[0] in FAMILIES else (FAMILIES[0], *argv)
    recipe = f"{family}-quickstart"
    job = training_job(recipe)
    if not (CHECKOUT / RUNTIME_ENV).is_file():
        return job(others, about=about, prog=prog)
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

    return replace(job, run=submit)(arguments, about=about, prog=prog)
