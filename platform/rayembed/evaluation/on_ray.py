"""Evaluation as a Ray task, on the resources that it is given."""

from pathlib import Path

import ray

from rayembed.config.run import Run
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

    Waits for it. `reference` and `results_folder` must lie where every node reads and writes.

    Args:
        num_threads: of torch; None: `num_cpus`, rounded down, at least 1.

    Raises:
        RayembedError: what `evaluate_reference` raises, unwrapped from Ray's error.
    """
    task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=2)(_evaluate)
    threads = num_threads or max(1, int(num_cpus))
    try:
        scores: dict[str, float] = ray.get(
            task.remote(str(reference), run, name, str(results_folder), threads, num_gpus > 0)
        )
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    return scores


def _evaluate(
    reference: str, run: Run, name: str, results_folder: str, threads: int, use_gpu: bool
) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    return evaluate_reference(
        reference,
        run,
        name=name,
        results_folder=results_folder,
        device="cuda" if use_gpu else "cpu",
    )
