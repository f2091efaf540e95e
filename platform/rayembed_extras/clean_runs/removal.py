"""Remove the selected contents: first all checks, then steps that can be interrupted and
repeated.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rayembed.assets.storage import (
    exists,
    is_remote,
    join,
    read_bytes,
    remove_file,
    remove_folder,
    write_atomic,
)
from rayembed.config.settings import nearest
from rayembed.errors import ArtifactError, ConfigError
from rayembed.pipeline.run.folders import RUNS, SWEEPS, locked_place
from rayembed_extras.clean_runs.contents import (
    CHECKPOINTS,
    DATA,
    FOLDER,
    MADE_OF,
    MANIFEST,
    RUN,
    RUN_FILE,
    STATE_FOLDER,
    STATES,
    SWEEP_FILE,
    TEMPORARY,
    CleanRequest,
    StoredRun,
    part_of,
)
from rayembed_extras.clean_runs.inventory import REMOVED, Inventory
from rayembed_extras.clean_runs.mlflow_entries import MlflowEntries, Version

_SHOWN = 3


@dataclass(frozen=True)
class Step:
    """One removal; if it is interrupted, the next call completes it."""

    what: str
    num_bytes: int
    remove: Callable[[], None]


def steps_of(asked: CleanRequest, inventory: Inventory, entries: MlflowEntries) -> list[Step]:
    """Plan the requested removals, in order, without removing anything.

    Raises:
        ConfigError: no such run, or options that do not go together.
        ArtifactError: a job is at work, a registered version or another run needs what would go.
        TrackingError: MLflow is away.
    """
    chosen = named_runs(inventory, asked.runs)
    steps: list[Step] = []
    going: list[StoredRun] = []
    if FOLDER in asked.free or RUN in asked.free:
        going = _with_trials(inventory, chosen)
    elif STATES in asked.free:
        steps += _of_states(inventory, chosen)
    if going:
        _check_free(inventory, going)
        for run in going:
            tracked = run.tracked if RUN in asked.free else None
            versions: list[Version] = [] if tracked is None else entries.versions(tracked)
            if versions and not asked.delete_versions:
                raise ArtifactError(
                    f"the {_kind(run)} {run.name!r} has registered models: "
                    f"{', '.join(map(str, versions))}. Without its files MLflow could not load "
                    "these models; add --delete-versions to remove the registered versions too, "
                    "or use --free folder, which keeps everything in MLflow"
                )
            if tracked is None and not run.is_sent and run.tracked is not None:
                raise ArtifactError(
                    f"some data of the {_kind(run)} {run.name!r} is in its folder only, not yet in "
                    "MLflow: run its command again with --send-metrics first, or remove the folder "
                    "and the MLflow entry together (--free run)"
                )
            _check_versions_free(inventory, going, run, versions)
            steps.append(_of_run(inventory, run, entries, versions, in_mlflow=tracked is not None))
    if DATA in asked.free:
        steps += _of_data(inventory, going)
    if TEMPORARY in asked.free and (files := inventory.temporary):
        gone = {f"{run.kind}/{run.name}/" for run in going}
        left = {p: n for p, n in files.items() if not p.startswith(tuple(gone))}
        if left:
            do = partial(_each, remove_file, [join(inventory.storage, path) for path in left])
            steps.append(Step(f"{len(left)} half-written files", sum(left.values()), do))
    return steps


def named_runs(inventory: Inventory, names: Sequence[str]) -> list[StoredRun]:
    """Find the runs and sweeps with the given names, without duplicates.

    Raises:
        ConfigError: there is none of a name, or a run and a sweep have it.
    """
    found: dict[tuple[str, str], StoredRun] = {}
    for name in names:
        fits = [run for run in inventory.runs if name in (run.name, f"{run.kind}/{run.name}")]
        if not fits:
            raise ConfigError(
                f"--run {name!r}: {inventory.storage!r} has no run or sweep of that name that "
                f"rayembed made; {nearest(name, [run.name for run in inventory.runs])}"
            )
        if len(fits) > 1:
            raise ConfigError(
                f"--run {name!r}: both a run and a sweep have that name; write --run "
                f"{RUNS}/{name} or --run {SWEEPS}/{name}"
            )
        found[fits[0].kind, fits[0].name] = fits[0]
    return list(found.values())


def _with_trials(inventory: Inventory, chosen: Iterable[StoredRun]) -> list[StoredRun]:
    """Insert the trials of each sweep before it, without duplicates."""
    found: dict[tuple[str, str], StoredRun] = {}
    for run in chosen:
        for one in (*inventory.trials(run), run):
            found[one.kind, one.name] = one
    return list(found.values())


def _of_states(inventory: Inventory, chosen: Sequence[StoredRun]) -> list[Step]:
    """Plan the removal of finished runs' checkpoints; raise if a selected run is not finished."""
    for run in chosen:
        if run.kind == RUNS and not run.is_over:
            raise ArtifactError(
                f"the run {run.name!r} is {run.state}, and needs its checkpoints to resume. Run "
                "its command again to finish it, or remove all of it (--free run)"
            )
    runs = _with_trials(inventory, chosen) if chosen else inventory.runs
    steps = []
    for run in runs:
        if run.kind != RUNS or not run.is_over or (run.keeps_states and not chosen):
            continue
        place = f"{run.kind}/{run.name}"
        states = (path for path in inventory.below(place) if part_of(path) == CHECKPOINTS)
        tops = sorted({path.partition("/")[0] for path in states})
        if tops:
            folders = [join(inventory.storage, place, top, STATE_FOLDER) for top in tops]
            do = partial(_locked, inventory.storage, run, partial(_each, remove_folder, folders))
            steps.append(Step(f"checkpoints of {run.name}", run.parts[CHECKPOINTS], do))
    return steps


def _check_free(inventory: Inventory, going: Sequence[StoredRun]) -> None:
    """Raise if a job is using one of the runs, or if another run or sweep needs it."""
    staying = _staying(inventory, going)
    for run in going:
        if run.state == "running":
            raise ArtifactError(
                f"the {_kind(run)} {run.name!r} cannot be removed, because a job works on it "
                "right now; stop the job or wait for it"
            )
        sweep = [one for one in staying if one.kind == SWEEPS and one.name == run.sweep]
        if sweep and sweep[0].state != "done":
            raise ArtifactError(
                f"the run {run.name!r} cannot be removed: it is a trial of the sweep "
                f"{run.sweep!r}, which is {sweep[0].state} and reads the trial when it resumes; "
                f"finish the sweep, or remove the sweep with all of its trials (--run {run.sweep})"
            )
        place = f"{run.kind}/{run.name}"
        if users := [one.name for one in staying if _leads_to(one.text, inventory.storage, place)]:
            raise ArtifactError(
                f"the run {run.name!r} cannot be removed: {_listed(users)} of this storage use "
                f"one of its models; remove these too (--run), or keep the run {run.name!r}"
            )


def _staying(inventory: Inventory, going: Sequence[StoredRun]) -> list[StoredRun]:
    keys = {(run.kind, run.name) for run in going}
    return [run for run in inventory.runs if (run.kind, run.name) not in keys]


def _leads_to(text: str, storage: str, place: str) -> bool:
    """Whether a settings text refers to a storage folder, by its name or by any file path
    into it.
    """
    plain = re.sub(r"(?<!:)/(\.?/)+", "/", text)
    if re.search(rf"(?<![\w.-]){re.escape(place)}(?![\w.-])", plain):
        return True
    if is_remote(storage):
        return False
    folder = os.path.realpath(join(storage, place)) + os.sep
    words = {word for word in re.findall(r"""[^\s'"\[\]{},]+""", text) if "/" in word}
    return any(f"{os.path.realpath(word)}/".startswith(folder) for word in words)


def _check_versions_free(
    inventory: Inventory, going: Sequence[StoredRun], run: StoredRun, versions: Sequence[Version]
) -> None:
    """Raise if a run or sweep that is kept refers to a model version that would be removed."""
    staying = _staying(inventory, going)
    for version in versions:
        ends = [f"/{version.number}", *(f"@{alias}" for alias in version.aliases)]
        names = "|".join(re.escape(f"models:/{version.name}{end}") for end in ends)
        named = re.compile(rf"(?:{names})(?![\w.-])")
        if users := [one.name for one in staying if named.search(one.text)]:
            raise ArtifactError(
                f"the {_kind(run)} {run.name!r} cannot be removed: {_listed(users)} of this "
                f"storage use its model {version}; remove these too (--run), or keep the "
                f"{_kind(run)}"
            )


def _of_run(
    inventory: Inventory,
    run: StoredRun,
    entries: MlflowEntries,
    versions: list[Version],
    *,
    in_mlflow: bool,
) -> Step:
    """Plan the removal of a run's folder, after its MLflow entries if these are removed too."""
    place, tracked = f"{run.kind}/{run.name}", run.tracked if in_mlflow else None
    note = RUN_FILE if run.kind == RUNS else SWEEP_FILE

    def remove() -> None:
        if tracked is not None:
            entries.remove(tracked, versions)
        _remove_run(join(inventory.storage, place), inventory.below(place), note)

    artifacts = None if tracked is None else entries.num_bytes(tracked)
    what = f"{_kind(run)} {run.name}"
    if in_mlflow:
        what += " with MLflow's entries" if tracked is not None else ", which MLflow does not know"
    what += "".join(f", {version}" for version in versions)
    do = partial(_locked, inventory.storage, run, remove)
    return Step(what, run.num_bytes + (artifacts or 0), do)


def _of_data(inventory: Inventory, going: Sequence[StoredRun]) -> list[Step]:
    """Plan the removal of data that no remaining run uses; recently written data is kept unless a
    removed run used it.
    """
    staying = _staying(inventory, going)
    if busy := [*inventory.at_work(), *inventory.being_made()]:
        raise ArtifactError(
            "--free data: nothing was removed, because jobs are running in this storage "
            f"({_listed(busy)}) and may be about to read any of its data; wait for these jobs or "
            "stop them"
        )
    if silent := [run.name for run in staying if not run.names_data]:
        raise ArtifactError(
            f"--free data: nothing was removed, because the folder of {_listed(silent)} does not "
            "record which data it uses: it was stopped too early. Run its command again to "
            "record its data, or remove it (--free run)"
        )
    unused, steps = inventory.unused(staying, going), []
    vectors = sorted(path for path in unused if path in inventory.vectors)
    for folder, paths in groupby(vectors, lambda path: path.rpartition("/")[0]):
        files = {path: unused[path] for path in paths}
        do = partial(_each, remove_file, [join(inventory.storage, path) for path in files])
        steps.append(Step(f"{len(files)} files of {folder}", sum(files.values()), do))
    for place in unused.keys() - inventory.vectors.keys():
        do = partial(_remove_prepared, join(inventory.storage, place), inventory.below(place))
        steps.append(Step(place, unused[place], do))
    return sorted(steps, key=lambda step: step.what)


def _locked(storage: str, run: StoredRun, remove: Callable[[], None]) -> None:
    """Call a removal while holding the run's lock and lease, so that no job can start the run
    meanwhile.
    """
    what = f"works on the {_kind(run)} {run.name!r}"
    with locked_place(storage, run.kind, run.name, what) as files:
        remove()
        if is_remote(storage) and not exists(files.place):
            shutil.rmtree(files.local, ignore_errors=True)


def _remove_run(place: str, below: Mapping[str, int], note: str) -> None:
    """Remove a run's folder, so that an interrupted removal leaves no model that looks complete and
    can be repeated.

    A run whose removal was cut off is trained again by its command, and removed by the next call.
    """
    for path in below:
        if path.endswith(f"/{MADE_OF}"):
            remove_file(join(place, path))
    _remove_tops(place, [path for path in below if path != note])
    remove_folder(place)


def _remove_prepared(place: str, below: Mapping[str, int]) -> None:
    """Remove a folder of data or a plan, so that after an interruption no job uses the rest and the
    next removal finishes.

    Its manifest gets another name first, by which it is known. Then go the results of units, which
    say that parts are there.
    """
    if MANIFEST in below:
        write_atomic(join(place, REMOVED), read_bytes(join(place, MANIFEST)))
        remove_file(join(place, MANIFEST))
    _remove_tops(place, [path for path in below if path.startswith("units/")])
    rest = [p for p in below if not p.startswith("units/") and p not in (MANIFEST, REMOVED)]
    _remove_tops(place, rest)
    remove_folder(place)


def _remove_tops(place: str, paths: Collection[str]) -> None:
    """Remove files that lie directly in a folder, and whole subfolders that contain other given
    paths.
    """
    for top in sorted({path.partition("/")[0] for path in paths}):
        if top in paths:
            remove_file(join(place, top))
        else:
            remove_folder(join(place, top))


def _each(remove: Callable[[str], None], places: Iterable[str]) -> None:
    for place in places:
        remove(place)


def _kind(run: StoredRun) -> str:
    return "run" if run.kind == RUNS else "sweep"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
