"""Scores of a loaded model on tasks that are at hand, in this process: for analyses."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rayembed.evaluation.loaded_spec import LoadedSpec
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.score import Store, score


@dataclass(frozen=True, eq=False)
class MadeTask:
    """A task that is at hand with its data, which travels with it."""

    made: Any

    @property
    def name(self) -> str:
        """The task's name."""
        return str(self.made.metadata.name)

    @property
    def num_texts(self) -> int:
        """Not known: such tasks are small."""
        return 0

    def load(self) -> Any:
        """A fresh task."""
        fresh = type(self.made)(self.made.sample)
        fresh.metadata = self.made.metadata  # with the name of a part of the sample
        return fresh


def scores_of(
    spec: LoadedSpec, tasks: Sequence[Any], results_folder: str | Path, device: str
) -> dict[str, float]:
    """Main score of each task by its name, taken in this process; results are kept in the folder.

    Raises:
        RayembedError: a task cannot be scored.
    """
    factories = [MadeTask(task) for task in tasks]
    pool = partial(run_here, device=device)
    with tempfile.TemporaryDirectory(prefix="embeddings-") as embeddings:
        scored = score(spec, factories, pool, Store(str(results_folder), embeddings))
    for _, error in scored.failed:
        raise error
    return scored.scores
