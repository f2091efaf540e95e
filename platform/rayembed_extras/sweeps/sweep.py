"""Run a sweep: check, prepare data, run trials, compare them, and register the best model."""

import json
import logging
from collections.abc import Mapping, Sequence

import yaml

from rayembed.assets.storage import exists, file_name, join, read_bytes, write_atomic
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.document import read_yaml, without_places
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, RayembedError, StorageError, WorkerError
from rayembed.machine.device import settled_placement
from rayembed.pipeline.run.folders import RUNS, files_of
from rayembed.pipeline.run.on_ray import OnRay, connect
from rayembed.pipeline.run.report import Outcome
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.registry.run_folder import flatten
from rayembed.registry.tracking import Status, Tracker
from rayembed.registry.tracking_uri import reachable_tracking_uri
from rayembed.training.checkpoints.checkpoint_list import remove_states
from rayembed.training.faults.elastic_on_ray import free_nodes
from rayembed.training.on_ray import check_placement, check_placement_now, worker_precision
from rayembed_extras.sweeps.concurrency import trials_at_once
from rayembed_extras.sweeps.dry_run import expected_time
from rayembed_extras.sweeps.folder import locked_sweep, sweep_as_begun, sweep_settled
from rayembed_extras.sweeps.on_ray import check_dashboard, run_trials
from rayembed_extras.sweeps.report import print_swept, write_report
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.trial import check_runs, prepare_runs, register_best
from rayembed_extras.sweeps.trial_store import TrialRecord, TrialStore, best
from rayembed_extras.sweeps.trials import (
    check_sweep,
    data_runs,
    known_trials,
    number_left,
    unfinished,
)

logger = logging.getLogger(__name__)

SWEEP_FILE = "sweep.yaml"
"""The resolved sweep, in its folder."""

DATA_FILE = "data.json"
"""Plan names that the trials read, by the first trial of each distinct data preparation."""

ENDED_TAG = "rayembed.sweep.ended_at_step"
"""Tag on the MLflow run of a trial that the scheduler ended."""


def sweep_runs(
    sweep: Sweep, printed: Mapping[str, Mapping[str, float]] | None = None, source: str = ""
) -> None:
    """Run a sweep or resume it, register the best trial's model, and print the tables.

    Everything that a user can get wrong is checked before a worker starts.

    Args:
        printed: scores of a paper to compare with: row → column → figure.
        source: paper and table that they are of.

    Raises:
        RayembedError: what is wrong and what to do; a failed trial stops no other and is
            reported at the end.
    """
    sweep = sweep.placed(storage_path=absolute_storage(sweep.base.placement.storage_path))
    check_sweep(sweep)
    with locked_sweep(sweep) as files:
        _sweep(sweep, files, printed or {}, source)


def _sweep(
    sweep: Sweep,
    files: StoredFolder,
    printed: Mapping[str, Mapping[str, float]],
    source: str,
) -> None:
    sweep = _as_begun(sweep, files.place)
    placement = sweep.base.placement
    tracking_uri = reachable_tracking_uri(placement.tracking_uri, placement.storage_path)
    check_runs([sweep.base, *(trial.run for trial in known_trials(sweep))])
    connect()
    sweep = _settled(sweep)
    placement = sweep.base.placement
    trials = known_trials(sweep)
    trial_store = TrialStore(files.place)
    past = trial_store.read()
    left = number_left(sweep, trials, past)
    if left:
        logger.info("%s", expected_time(sweep, unfinished(trials, past), left))
    needed = data_runs(sweep, [trial.run for trial in trials])
    folders = prepare_runs(needed)
    made = {r.name: sorted(map(file_name, f)) for r, f in zip(needed, folders, strict=True)}
    logger.info("the data of all trials are prepared (%d distinct data preparations)", len(needed))
    plans = _with_earlier(sweep, files.place, made)
    if left:
        runs = min(left, sweep.trials_at_once or 1)
        check_placement(placement, validates=sweep.validates, runs=runs)
    # Only now the name is taken: a mistake in the settings must not use it up.
    write_atomic(files.local / DATA_FILE, json.dumps(plans, indent=1).encode())
    write_atomic(files.local / SWEEP_FILE, sweep.to_yaml().encode())
    files.keep()
    with Tracker.open(
        tracking_uri,
        placement.experiment,
        sweep.name,
        sweep.fingerprint,
        without_places(
            flatten(sweep.model_dump(mode="json", exclude={"runs"})), placement.storage_path
        ),
        {"rayembed.kind": "sweep"},
        folder=files.local,
        total_steps=0,
        storage=placement.storage_path,
    ) as tracker:
        tags = {"mlflow.parentRunId": tracker.run_id, "rayembed.sweep": sweep.name}
        try:
            run_trials(sweep, trials, trial_store, tags)
        finally:
            records = trial_store.read()
            _close_ended(sweep, records)
            report = write_report(sweep, records, files, tracker, printed, source)
            files.keep()
        outcome = _register_best(sweep, records, tracker)
        tracker.status = "FAILED" if _failed(records) else "FINISHED"
    files.keep()
    print_swept(sweep, records, report, outcome, printed, source, mlflow_complete=tracker.complete)
    _refuse_failed(records)


def _settled(sweep: Sweep) -> Sweep:
    """Resolve device and number type of the sweep; raise if the cluster cannot hold a
    trial.

    Raises:
        PlacementError: it cannot.
    """
    placement = sweep.base.placement
    sweep = sweep.placed(use_gpu=settled_placement(placement, OnRay().gpus(placement)).use_gpu)
    placement, validates = sweep.base.placement, sweep.validates
    check_placement_now(placement, validates=validates)
    if not placement.wait_for_nodes_seconds:
        trials_at_once(placement, free_nodes(), validates=validates)
    check_dashboard()
    return sweep_settled(sweep, worker_precision)


def _as_begun(sweep: Sweep, place: str) -> Sweep:
    """Give the sweep the number types with which it began, if its folder exists; raise if its
    settings have changed.

    Raises:
        ArtifactError: another sweep of that name was begun there.
    """
    path = join(place, SWEEP_FILE)
    if not exists(path):
        return sweep
    try:
        begun = parse(Sweep, read_yaml(read_bytes(path).decode()))
    except (ValueError, yaml.YAMLError) as error:  # a ConfigError is a ValueError
        raise ArtifactError(
            f"{path!r} cannot be read: {error}\nGive this sweep another --name, or move the "
            "folder away"
        ) from None
    sweep, found = sweep_as_begun(sweep, begun), begun.fingerprint
    if found != sweep.fingerprint:
        raise ArtifactError(
            f"the sweep {sweep.name!r} (fingerprint {sweep.fingerprint}) cannot resume in "
            f"{place!r}: a sweep with fingerprint {found} was started there. Runs, space, search, "
            "scheduler or metric differ; give this sweep another --name, or restore the settings"
        )
    logger.info("sweep %s resumes in the folder %s", sweep.name, place)
    return sweep


def _with_earlier(
    sweep: Sweep, place: str, plans: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """Return the plan names of each trial, including those recorded in earlier submissions of the
    sweep.

    Raises:
        ArtifactError: a trial would read another plan than then, as files have changed.
    """
    path = join(place, DATA_FILE)
    begun = json.loads(read_bytes(path)) if exists(path) else {}
    known = [(begun[key], plans[key]) for key in plans if key in begun]
    if changed := [(before, now) for before, now in known if before != now]:
        before, now = (", ".join(names) for names in changed[0])
        raise ArtifactError(
            f"the sweep {sweep.name!r} cannot resume: since its start, files of its data or the "
            f"version of rayembed have changed (the batch plan {before} would be {now} now), and "
            "trials on other data cannot be compared. Give this sweep another --name, or restore "
            "the files or the version"
        )
    return {**begun, **plans}


def _close_ended(sweep: Sweep, records: Mapping[str, TrialRecord]) -> None:
    """Close the MLflow runs of trials whose processes were killed before they could do so."""
    statuses: dict[str, Status] = {"stopped": "KILLED", "failed": "FAILED"}
    for record in records.values():
        name, status = record.key, statuses.get(record.state)
        if status is None:
            continue
        run = sweep.runs[record.label].model_copy(update={"name": name})
        try:
            files = files_of(run.placement.storage_path, RUNS, name)
            files.fetch()
            tracker = Tracker.reopen(files.local)
            tracker.send_all(MetricsLog(files.local / METRICS_FILE))
        except RayembedError as error:
            # A trial may fail before it has a run.
            has_none = isinstance(error, ArtifactError) and not isinstance(error, StorageError)
            if status != "FAILED" or not has_none:
                logger.warning(
                    "cannot record in MLflow that the trial %s was stopped: %s", name, error
                )
            continue
        if status == "KILLED":
            tracker.set_tags({ENDED_TAG: str(record.last_step)})
        tracker.close(status)
        if status == "KILLED":  # the scheduler's word is final: the trial never goes on
            remove_states(run, files.place)


def _register_best(
    sweep: Sweep, records: Mapping[str, TrialRecord], tracker: Tracker
) -> Outcome | None:
    """Register the model of the best trial, whose run is already trained; return its outcome."""
    found = best(records)
    if found is None or found.final is None:
        return None
    tracker.log_scores("best", {"score": found.final.score}, found.final.global_step)
    tracker.set_tags({"rayembed.sweep.best": found.key})
    logger.info("the best trial is %s with a score of %.4f", found.key, found.final.score)
    return register_best(sweep, found)


def _failed(records: Mapping[str, TrialRecord]) -> list[TrialRecord]:
    return [record for record in records.values() if record.state == "failed"]


def _refuse_failed(records: Mapping[str, TrialRecord]) -> None:
    """Raise if a trial has failed.

    Raises:
        WorkerError: names those that have, each with its problem.
    """
    failed = _failed(records)
    if failed:
        problems = {record.key: record.problem.replace("\n", "\n    ") for record in failed}
        reasons = "\n".join(f"  {key}: {problem}" for key, problem in problems.items())
        raise WorkerError(
            f"{len(failed)} of {len(records)} trials failed; the others are done. Submit the "
            f"sweep again to retry them:\n{reasons}"
        )
