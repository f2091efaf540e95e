"""Trials as a grid of Ray Tune.

A trial is one process that has all it needs in its own placement group. So Tune knows of every
resource that is taken, and trials can neither wait for each other's workers nor leave any behind.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import tune

from rayembed import errors
from rayembed.assets.storage import is_remote, open_storage_for_ray
from rayembed.errors import PlacementError, RayembedError, WorkerError
from rayembed_papers.backbone.settings import BackbonePlacement
from rayembed_papers.backbone.trial import Trial, run_trial

_PROBLEM = "problem"
"""Key in a trial's report: class and message of an error that another try does not mend."""

_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results are ours; TensorBoard is not there
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a table whatever the verbosity is
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the job, which goes on when submitted again
}

WhenDone = Callable[[Trial, RayembedError | None], None]
"""Callback for each trial that ends, with its error if it failed."""


@dataclass(frozen=True)
class _Work:
    """Trainable of Ray Tune that runs one trial."""

    trials: Mapping[str, Trial]
    use_gpu: bool
    threads: int
    predict_batch: int

    def __call__(self, config: dict[str, Any]) -> None:
        told: dict[str, Any] = {}
        try:
            run_trial(
                self.trials[config["trial"]],
                use_gpu=self.use_gpu,
                predict_batch=self.predict_batch,
            )
        except RayembedError as error:
            told = {_PROBLEM: [type(error).__name__, str(error)]}
        tune.report({_PROBLEM: None, **told})


class _Listener(tune.Callback):  # type: ignore[misc] # Ray is not typed
    """Tells of trials as they end."""

    def __init__(self, trials: Mapping[str, Trial], when_done: WhenDone) -> None:
        self._trials, self._when_done = trials, when_done

    def on_trial_complete(self, *, trial: Any, **_: Any) -> None:
        self._when_done(self._trials[trial.config["trial"]], _problem_of(trial.last_result))

    def on_trial_error(self, *, trial: Any, **_: Any) -> None:
        self._when_done(self._trials[trial.config["trial"]], _lost(trial.config["trial"]))


def run_trials(
    trials: Sequence[Trial],
    placement: BackbonePlacement,
    when_done: WhenDone,
    *,
    folder: str,
    name: str,
) -> dict[str, RayembedError]:
    """Run the trials; return errors by the trials' keys, the others have results in storage.

    A trial whose process dies or whose training fails begins again, `placement.retries` times.

    Args:
        folder: in storage, for Tune's own files.
        name: of their folder in it; another for each call.

    Raises:
        PlacementError: no node can hold a trial.
    """
    by_key = {trial.key: trial for trial in trials}
    needed = trial_resources(placement)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    at_once = trials_at_once(placement, nodes, ray.available_resources())
    threads = placement.threads_per_trial or max(1, int(placement.cpus_per_trial))
    work = _Work(by_key, placement.on_gpu, threads, placement.predict_batch)
    filesystem, inside = open_storage_for_ray(folder) if is_remote(folder) else (None, folder)
    os.environ.update({key: value for key, value in _QUIET.items() if key not in os.environ})
    found = tune.Tuner(
        tune.with_resources(tune.with_parameters(_run, work=work), needed),
        param_space={"trial": tune.grid_search(list(by_key))},
        tune_config=tune.TuneConfig(max_concurrent_trials=at_once),
        run_config=tune.RunConfig(
            name=name,
            storage_path=inside,
            storage_filesystem=filesystem,
            failure_config=tune.FailureConfig(max_failures=placement.retries),
            callbacks=[_Listener(by_key, when_done)],
            verbose=0,
        ),
    ).fit()
    ended = {}
    for result in found:
        key = (result.config or {}).get("trial", "")
        error = _lost(key, result.error) if result.error else _problem_of(result.metrics)
        if error is not None:
            ended[key] = error
    return ended


def trial_resources(placement: BackbonePlacement) -> dict[str, float]:
    """Resources that each trial reserves, by Ray's names."""
    needed = {"CPU": float(placement.cpus_per_trial)}
    return {**needed, "GPU": 1.0} if placement.on_gpu else needed


def trials_at_once(
    placement: BackbonePlacement, nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> int:
    """Number of trials that run at once: what the settings say, or what the free resources hold.

    Args:
        nodes: resources of each live node.
        free: those of all nodes that nobody has reserved.

    Raises:
        PlacementError: no node could hold a trial, even with nothing else on it.
    """
    needed = trial_resources(placement)
    fit = sum(_times(node, needed) for node in nodes)
    if not fit:
        shown = ", ".join(f"{amount:g} {kind}" for kind, amount in needed.items())
        there = "; ".join(
            ", ".join(f"{node.get(kind, 0):g} {kind}" for kind in needed) for node in nodes
        )
        raise PlacementError(
            f"no node has the {shown} that a trial needs; the nodes have {there or 'nothing'}. "
            "Lower placement.cpus_per_trial, set placement.use_gpu=false or add larger nodes"
        )
    return placement.trials_at_once or max(1, min(fit, _times(free, needed)))


def _times(node: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """Number of times that the resources hold what is needed."""
    return min(int(node.get(kind, 0.0) / amount + 1e-9) for kind, amount in needed.items())


def _run(config: dict[str, Any], work: _Work) -> None:
    """A trial in a process of its own."""
    import torch
    import transformers

    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    transformers.utils.logging.set_verbosity_error()  # it lists the new weights of every head
    torch.set_num_threads(work.threads)
    work(config)


def _problem_of(metrics: Mapping[str, Any] | None) -> RayembedError | None:
    told = (metrics or {}).get(_PROBLEM)
    if told is None:
        return None
    kind, message = told
    error: RayembedError = getattr(errors, kind)(message)
    return error


def _lost(key: str, error: BaseException | None = None) -> WorkerError:
    told = f": {error}" if error is not None else ""
    return WorkerError(
        f"the trial {key} failed more often than placement.retries allows{told}\nIf memory ran "
        "out, lower placement.predict_batch or protocol.batch_sizes, or let fewer trials run side "
        "by side; then submit the job again, which repeats what is missing"
    )
