"""Evaluation as a Ray task, on the resources that it is given."""

import logging
import tempfile
from pathlib import Path

import ray

from rayembed.assets.storage import is_remote
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.run import Run
from rayembed.errors import WorkerError
from rayembed.evaluation.evaluate import evaluate_reference


def evaluate_on_ray(
    reference: str | Path,
    run: Run,
    *,
    name: str,
    results_folder: str | Path,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    num_threads: int | None = None,
) -> dict[str, float]:
    """Main score of each task, as `evaluate_reference` gives them, from a task on the cluster.

    Waits for it.

    Args:
        reference: `bm25`, or an asset reference that every node resolves.
        results_folder: where every node reads and writes, in object storage or on shared disks.
        num_threads: of torch; None: `num_cpus`, rounded down, at least 1.

    Raises:
        RayembedError: what `evaluate_reference` raises, unwrapped from Ray's error.
        WorkerError: the task was lost, also when it was tried again.
    """
    task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=2)(_evaluate)
    threads = num_threads or max(1, int(num_cpus))
    try:
        scores: dict[str, float] = ray.get(
            task.remote(str(reference), run, name, str(results_folder), threads, num_gpus > 0)
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
    reference: str, run: Run, name: str, results_folder: str, threads: int, use_gpu: bool
) -> dict[str, float]:
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
            return evaluate_reference(
                reference,
                run,
                name=name,
                results_folder=results.local,
                device="cuda" if use_gpu else "cpu",
            )
        finally:
            results.keep()
