"""Evaluation as a Ray task, on the resources that it is given."""

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray

from rayembed.assets.storage import is_remote
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.run import Run
from rayembed.errors import WorkerError
from rayembed.evaluation.evaluate import evaluate_reference

Scores = TypeVar("Scores")


def evaluate_on_ray(
    reference: str | Path,
    run: Run,
    *,
    name: str,
    results_folder: str | Path,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    num_threads: int | None = None,
    dimension: int | None = None,
    num_context: int | None = None,
) -> dict[str, float]:
    """Main score of each task, as `evaluate_reference` gives them, from a task on the cluster.

    Waits for it.

    Args:
        reference: `bm25`, or an asset reference that every node resolves.
        results_folder: where every node reads and writes, in object storage or on shared disks.
        num_threads: of torch; None: `num_cpus`, rounded down, at least 1.
        dimension: so many first values of each vector are kept (Matryoshka); None: all.
        num_context: documents of a contextual model's context; None: as many as it takes.

    Raises:
        RayembedError: what `evaluate_reference` raises, unwrapped from Ray's error.
        WorkerError: the task was lost, also when it was tried again.
    """
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    given = (str(reference), run, name)
    options = {"dimension": dimension, "num_context": num_context}
    return _run(
        _Scoring(evaluate_reference, given, options),
        results_folder,
        resources,
        num_threads,
    )


def measured_on_ray(
    measure: Callable[..., Scores],
    reference: str | Path,
    run: Run,
    *,
    name: str,
    results_folder: str | Path,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    num_threads: int | None = None,
    **options: Any,
) -> Scores:
    """What `measure` finds of a model, from a task on the cluster; arguments as `evaluate_on_ray`.

    Args:
        measure: takes reference, run, `name`, `results_folder`, `device` and the options.

    Raises:
        RayembedError: what it raises, unwrapped from Ray's error.
        WorkerError: the task was lost, also when it was tried again.
    """
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    scoring = _Scoring(measure, (str(reference), run, name), options)
    return _run(scoring, results_folder, resources, num_threads)


@dataclass(frozen=True)
class _Scoring(Generic[Scores]):
    """A function that scores a model, and what it is given: reference, run and name first."""

    function: Callable[..., Scores]
    given: tuple[str, Run, str]
    options: dict[str, Any]

    def __call__(self, results_folder: Path, device: str) -> Scores:
        reference, run, name = self.given
        return self.function(
            reference, run, name=name, results_folder=results_folder, device=device, **self.options
        )


def _run(
    scoring: _Scoring[Scores],
    results_folder: str | Path,
    resources: dict[str, float],
    num_threads: int | None,
) -> Scores:
    task = ray.remote(**resources, max_retries=2)(_evaluate)
    threads = num_threads or max(1, int(resources["num_cpus"]))
    name = scoring.given[2]
    try:
        scores: Scores = ray.get(
            task.remote(scoring, str(results_folder), threads, resources["num_gpus"] > 0)
        )
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"the evaluation of {name!r} was lost with its process or node: {error}\nIf memory "
            "ran out, lower evaluation.num_documents or evaluation.max_length, or give the nodes "
            "more; then submit the run again under the same name. Scores that are in "
            f"{str(results_folder)!r} are not taken again."
        ) from error
    return scores


def _evaluate(
    scoring: _Scoring[Scores], results_folder: str, threads: int, use_gpu: bool
) -> Scores:
    import torch

    # Ray shows a task's output in the job's log: a line when a task of the benchmark is scored.
    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("rayembed").setLevel(logging.INFO)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="scores-") as scratch:
        local = Path(scratch) if is_remote(results_folder) else Path(results_folder)
        results = StoredFolder(results_folder, local, recursive=True)
        results.fetch()
        try:
            return scoring(results.local, "cuda" if use_gpu else "cpu")
        finally:
            results.keep()
