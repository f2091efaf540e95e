"""Run trials with Ray Tune, each as a Ray Train run of its own.

    driver: Tuner ── _trial ── run_events ── Ray Train's controller ── workers
                     (scores)  (a run)       validation, export and evaluation tasks

Ray Tune places a trial in a placement group that catches all that it starts, so what a trial starts
would wait for CPUs that its group does not have. The run is therefore a task of its own beside it,
which no group catches.
"""

import logging
import math
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayembed.errors import (
    ArtifactError,
    AssetError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    DivergenceError,
    PlacementError,
    RayembedError,
    WorkerError,
    may_pass,
)
from rayembed.training.faults.elastic_on_ray import free_nodes
from rayembed_extras.sweeps.concurrency import trials_at_once, with_cores_of_their_own
from rayembed_extras.sweeps.decisions_on_ray import asha, searcher
from rayembed_extras.sweeps.optuna_space import texts
from rayembed_extras.sweeps.recorder import TrialRecorder
from rayembed_extras.sweeps.settings import OptunaSearch, Sweep
from rayembed_extras.sweeps.trial_store import Event, TrialRecord, TrialStore
from rayembed_extras.sweeps.trials import (
    Trial,
    counted,
    key_of,
    make_trial,
    number_left,
    unfinished,
)

logger = logging.getLogger(__name__)

_SAME_AGAIN = (
    ConfigError,
    DataError,
    ArtifactError,
    AssetError,
    DeviceMemoryError,
    DivergenceError,
)
"""Permanent errors; a retry would raise them again."""

_FRAME = re.compile(r'\s+File ".+", line \d+')

_GRAIN = 0.001

_GIVEN_BACK_SECONDS = 5.0
"""Maximum seconds until a finished task's resources are reported as free."""

_TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # CSV, JSON and TensorBoard files of each trial
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the job hears signals itself, and says so
}


def given_to(sweep: Sweep, config: Mapping[str, Any]) -> TrialRecord:
    """Create an empty record for the trial that Ray Tune starts with the given config."""
    if "trial" in config:
        return TrialRecord(**config["trial"])
    # Optuna's are the values themselves.
    label, values = next(iter(sweep.runs)), texts(sweep.domains, config)
    return TrialRecord(key_of(sweep, label, values), label, values)


def message_in(traceback: str) -> str:
    """Extract the last error's message from a traceback; the whole text if it has no stack
    frames.
    """
    lines = [line.rstrip() for line in traceback.splitlines() if line.strip()]
    begin = max((place + 1 for place, line in enumerate(lines) if _FRAME.match(line)), default=0)
    while 0 < begin < len(lines) - 1 and lines[begin][0].isspace():  # the frame's source
        begin += 1
    return "\n".join(lines[begin:])


def check_dashboard() -> None:
    """Raise if the cluster has no Ray dashboard, which releases the resources of stopped
    trials.

    Raises:
        PlacementError: it has none. Ray Train asks it whether the controller of a trial that was
            ended is gone, and would hold its workers' CPUs and GPUs for ever.
    """
    # In a worker, which knows the address of its own cluster's dashboard.
    try:
        ray.get(ray.remote(num_cpus=0)(_ask_dashboard).remote())
    except ray.exceptions.RayError as error:
        raise PlacementError(
            "a sweep needs Ray's dashboard, which releases the CPUs and GPUs of stopped trials, "
            "but the dashboard does not answer; start the cluster with --include-dashboard=true. "
            f"Ray says: {error}"
        ) from None


def _ask_dashboard() -> None:
    from ray.util.state import list_nodes

    list_nodes(limit=1, timeout=30)


def run_trials(
    sweep: Sweep, trials: Sequence[Trial], trial_store: TrialStore, tags: Mapping[str, str]
) -> None:
    """Run all unfinished trials to their end and record them in the trial store.

    Args:
        trials: those that are known in advance; none with Optuna.
        trial_store: to which only this process writes.
        tags: of every trial's MLflow run.

    Raises:
        PlacementError: not one trial fits into what is free.
        WorkerError: Ray Tune was stopped before all trials had ended.
    """
    past = trial_store.read()
    todo = unfinished(trials, past)
    done = [record for record in past.values() if record.is_done]
    number = number_left(sweep, trials, past)
    if number == 0:
        logger.info(
            "no trial is left to run: all %d trials ended in earlier submissions", len(done)
        )
        return
    at_once = min(_trials_that_fit(sweep, sweep.trials_at_once or number), number)
    known = len(trials) or number + len(done)
    logger.info("starting %d of %d trials, %d at a time", number, known, at_once)
    own = with_cores_of_their_own(sweep, at_once)
    if own is not sweep:
        logger.info(
            "trials run side by side, so each worker uses %d thread(s); to get identical results "
            "from a single trial, set --set placement.threads_per_worker=%d",
            *(own.base.placement.threads_per_worker,) * 2,
        )
    sweep = own
    for name, value in _TUNE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Its warnings do not concern us: results are in the trial store, and trials start slowly.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    recorder = TrialRecorder(trial_store, past)
    runs = [trial.run for trial in trials] or list(map(counted, sweep.runs.values()))
    total = max(run.total_steps for run in runs)
    drawn = isinstance(sweep.search, OptunaSearch)  # which has a space of its own
    given = [{"key": t.key, "label": t.label, "values": dict(t.values)} for t in todo]
    space = {} if drawn else {"trial": tune.grid_search(given)}
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(_trial, sweep=sweep, trial_store=trial_store, tags=tags),
                _beside_the_driver(),
            ),
            param_space=space,
            tune_config=tune.TuneConfig(
                search_alg=searcher(sweep, list(past.values())),
                scheduler=asha(sweep, done, total),
                num_samples=number if drawn else 1,
                max_concurrent_trials=at_once,
            ),
            run_config=tune.RunConfig(
                name=sweep.name,
                storage_path=scratch,
                callbacks=[_Callback(recorder, sweep)],
                failure_config=tune.FailureConfig(max_failures=sweep.trial_failures),
                verbose=0,
            ),
        )
        tuner.fit()
    if recorder.num_ended < number:  # Ray Tune takes an interrupt for an end like any other
        raise WorkerError(
            f"the sweep was stopped when {recorder.num_ended} of {number} trials had ended; "
            "submit the sweep again under the same name to resume it"
        )


def _trials_that_fit(sweep: Sweep, wanted: int) -> int:
    """Count the trials, at most the given number, that fit into free resources.

    Asked for a while where they do not: the cluster hears late of what preparation has given back.

    Raises:
        PlacementError: none does.
    """
    deadline = time.monotonic() + _GIVEN_BACK_SECONDS
    while True:
        late = time.monotonic() > deadline
        try:
            found = trials_at_once(sweep.base.placement, free_nodes(), validates=sweep.validates)
        except PlacementError:
            if late:
                raise
            found = 0
        if late or found >= wanted:
            return min(found, wanted)
        time.sleep(0.5)


def _beside_the_driver() -> Any:
    """Reserve for each Tune trial only a tiny share of the driver's node; its training run reserves
    its own resources.

    It takes no CPU, so that workers may take all of them, also where the head node has none.
    """
    return tune.PlacementGroupFactory([{f"node:{ray.util.get_node_ip_address()}": _GRAIN}])


def _trial(
    config: dict[str, Any], sweep: Sweep, trial_store: TrialStore, tags: Mapping[str, str]
) -> None:
    """Ray Tune's trainable: train one trial, and report each score and finally its end."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    given = given_to(sweep, config)
    known = trial_store.find(given.key)
    if known is not None and known.is_done:  # Optuna may propose it again
        score = math.nan if known.score is None else known.score
        tune.report({**asdict(Event("known", known.last_step, score)), "done": True})
        return
    tags = {
        **tags,
        "rayembed.trial.label": given.label,
        **{f"rayembed.trial.{path}": value for path, value in given.values.items()},
    }
    # Scheduled by itself, so that what it starts is not caught in Tune's placement group. When Tune
    # ends a trial, Ray ends the task, as its owner is gone.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    run = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=here)(run_events)
    last_step, done = 0, False
    for event in map(ray.get, run.remote(sweep, given, tags)):
        done = event.kind != "score"
        if done or event.global_step > last_step:
            last_step = event.global_step
            tune.report({**asdict(event), "done": done})
    if not done:
        raise WorkerError(f"the trial {given.key} ended without its last score")


def run_events(sweep: Sweep, given: TrialRecord, tags: Mapping[str, str]) -> Iterator[Event]:
    """Yield the events of a trial, which trains in a daemon thread so that the process ends at once
    when Ray stops it.

    Raises:
        RayembedError: what ended the trial and may not happen again.
    """
    # Here alone: the process of Ray Tune that waits for this one needs no training.
    from rayembed_extras.sweeps.trial import run_trial

    logging.basicConfig(
        level="WARNING",
        format=f"%(asctime)s  {given.key}  %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("rayembed").setLevel(logging.INFO)
    events: queue.Queue[Event | RayembedError | None] = queue.Queue()

    def work() -> None:
        end: Event | RayembedError | None = None
        try:
            run_trial(sweep, make_trial(sweep, given.label, given.values), tags, events.put)
        except RayembedError as error:
            end = error
            if isinstance(error, _SAME_AGAIN) and not may_pass(error):
                problem = f"{type(error).__name__}: {error}"
                end = Event("problem", 0, math.nan, problem=problem)
        except Exception as error:  # Ray Tune tries again
            logger.exception("the trial %s failed", given.key)
            end = WorkerError(f"{type(error).__name__}: {error}")
        for last in (end, None):
            events.put(last)

    threading.Thread(target=work, name="trial", daemon=True).start()
    while (event := events.get()) is not None:
        if isinstance(event, RayembedError):
            raise event
        yield event


class _Callback(tune.Callback):  # type: ignore[misc]  # Ray is not typed
    """Ray Tune callback in the driver that forwards events to the recorder."""

    def __init__(self, recorder: TrialRecorder, sweep: Sweep) -> None:
        self._recorder, self._sweep = recorder, sweep

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record that a trial was started, or restarted after an error."""
        self._recorder.record_start(given_to(self._sweep, trial.config))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Record a score of a trial, or its end."""
        self._recorder.record(trial.trial_id, given_to(self._sweep, trial.config), result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the end of a trial, also if the scheduler stopped it."""
        self._recorder.record_end(trial.trial_id, given_to(self._sweep, trial.config).key)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the error that a trial failed with, after all restarts."""
        text = str(trial.get_pickled_error() or "the process of the trial died")
        given = given_to(self._sweep, trial.config)
        self._recorder.record_failure(trial.trial_id, given, message_in(text))
