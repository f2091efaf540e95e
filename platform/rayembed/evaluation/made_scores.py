"""Scores of a loaded model, taken in this process: for analyses."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rayembed.evaluation.jobs import TaskFactory
from rayembed.evaluation.loaded_spec import LoadedSpec
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.score import Store, score


def scores_of(
    spec: LoadedSpec, tasks: Sequence[TaskFactory], results_folder: str | Path, device: str
) -> dict[str, float]:
    """Main score of each task by its name, taken in this process; results are kept in the folder.

    Raises:
        RayembedError: a task cannot be scored.
    """
    pool = partial(run_here, device=device)
    with tempfile.TemporaryDirectory(prefix="embeddings-") as embeddings:
        scored = score(spec, tasks, pool, Store(str(results_folder), embeddings))
    for _, error in scored.failed:
        raise error
    return scored.scores
