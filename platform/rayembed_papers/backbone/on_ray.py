"""Run trials as Ray tasks, each in a process that reserves its resources."""

import logging
from collections.abc import Callable, Mapping, Sequence

import ray

from rayembed.errors import PlacementError, RayembedError, WorkerError
from rayembed_papers.backbone.settings import BackbonePlacement
from rayembed_papers.backbone.trial import Trial, run_trial

WhenDone = Callable[[Trial, RayembedError | None], None]
"""Callback for each trial that ends, with its error if it failed."""


def run_trials(
    trials: Sequence[Trial], placement: BackbonePlacement, when_done: WhenDone
) -> dict[str, RayembedError]:
    """Run the trials; return the errors of failed ones by trial key. Results of the others are in
    storage.

    A trial whose process dies or whose training fails begins again, `placement.retries` times.

    Raises:
        PlacementError: no node can hold a trial.
    """
    check_fits(placement, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    threads = placement.threads_per_trial or max(1, int(placement.cpus_per_trial))
    task = ray.remote(
        num_cpus=placement.cpus_per_trial,
        num_gpus=1.0 if placement.on_gpu else 0.0,
        max_calls=1,  # no trial begins with the memory of another
        max_retries=placement.retries,
        retry_exceptions=True,
    )(_run)
    waiting = list(trials)
    flying: dict[ray.ObjectRef, Trial] = {}
    ended: dict[str, RayembedError] = {}
    while waiting or flying:
        while waiting and len(flying) < (placement.trials_at_once or len(trials)):
            trial = waiting.pop(0)
            options = {"use_gpu": placement.on_gpu, "predict_batch": placement.predict_batch}
            flying[task.remote(threads, trial, **options)] = trial
        (done,), _ = ray.wait(list(flying))
        trial = flying.pop(done)
        try:
            error = ray.get(done)
        except ray.exceptions.RayError as problem:
            error = _lost(trial.key, problem)
        if error is not None:
            ended[trial.key] = error
        when_done(trial, error)
    return ended


def check_fits(placement: BackbonePlacement, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise if no node of the cluster, even when idle, can hold a trial.

    Args:
        nodes: resources of each live node.

    Raises:
        PlacementError: none can.
    """
    needed = {"CPU": float(placement.cpus_per_trial)} | ({"GPU": 1.0} if placement.on_gpu else {})
    if any(all(node.get(kind, 0.0) >= needed[kind] for kind in needed) for node in nodes):
        return
    shown = ", ".join(f"{amount:g} {kind}" for kind, amount in needed.items())
    there = "; ".join(
        ", ".join(f"{node.get(kind, 0):g} {kind}" for kind in needed) for node in nodes
    )
    raise PlacementError(
        f"no node has the {shown} that a trial needs; the nodes have {there or 'nothing'}. "
        "Lower placement.cpus_per_trial, set placement.use_gpu=false or add larger nodes"
    )


def _run(threads: int, trial: Trial, *, use_gpu: bool, predict_batch: int) -> RayembedError | None:
    """Run a trial in a process of its own."""
    import torch
    import transformers

    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    transformers.utils.logging.set_verbosity_error()  # it lists the new weights of every head
    torch.set_num_threads(threads)
    return attempt(trial, use_gpu=use_gpu, predict_batch=predict_batch)


def attempt(trial: Trial, *, use_gpu: bool, predict_batch: int) -> RayembedError | None:
    """Run a trial; return its error if a retry would not help, and raise other errors."""
    try:
        run_trial(trial, use_gpu=use_gpu, predict_batch=predict_batch)
    except RayembedError as error:
        return error
    return None


def _lost(key: str, error: BaseException) -> WorkerError:
    return WorkerError(
        f"the trial {key} failed more often than placement.retries allows: {error}\nIf memory ran "
        "out, lower placement.predict_batch or protocol.batch_sizes, or let fewer trials run side "
        "by side; then submit the job again, which repeats what is missing"
    )
