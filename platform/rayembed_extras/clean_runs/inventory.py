"""List a storage: runs and sweeps by part, and data folders with the runs that use them.

Read from one listing and from the files by which folders are recognised: `run.yaml`, `sweep.yaml`
and `manifest.json`. A folder without its file is listed and never removed.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import yaml

from rayembed.assets.atomic import STALE_SECONDS
from rayembed.assets.lease import LEASE_SECONDS
from rayembed.assets.storage import exists, file_sizes, file_times, join, read_bytes
from rayembed.config.document import fingerprint, read_yaml
from rayembed.errors import ArtifactError
from rayembed.pipeline.run.folders import LEASES, PLANS_FILE, RUNS, SWEEPS
from rayembed_extras.clean_runs.contents import (
    MANIFEST,
    PARTS,
    RUN_FILE,
    SWEEP_FILE,
    PreparedFolder,
    State,
    StoredRun,
    TrackedRun,
    part_of,
)

REMOVED = "removed.json"
"""Manifest of a folder that is being removed."""

_PREPARED = ("data", "plans")
_OWN = (RUNS, SWEEPS, *_PREPARED, "evaluation", "embeddings", "sizes", "compressed", "air-bench")
"""Folders of a storage that jobs write to; other folders are not read."""

_DATABASE = "mlflow.db"

_TRACKING, _OUTBOX, _SENT = "mlflow.json", "mlflow_outbox.jsonl", "mlflow_outbox.taken"
_TRIALS, _SWEPT = "trials/", "data.json"
_STORES = "teacher_vectors"
_TEMPORARY = re.compile(r"\..+\.\w{8}\.tmp")
_IDENTITY = re.compile(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])")
_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")

NEW_SECONDS = 86400.0
"""Age in seconds below which unused data counts as made for a run that is about to start."""


class Inventory:
    """Snapshot of what a storage contained when it was listed.

    Args:
        storage: absolute path or address.

    Raises:
        StorageError: the storage cannot be read.
    """

    def __init__(self, storage: str) -> None:
        self.storage = storage
        self.files = {
            f"{top}/{path}": size
            for top in _OWN
            for path, size in file_sizes(join(storage, top), recursive=True).items()
        }
        """Path below the storage → bytes."""
        self._folders: dict[str, dict[str, int]] = {}
        for path, size in self.files.items():
            top, _, rest = path.partition("/")
            depth = 2 if top == "data" else 1
            below = rest.split("/", depth)
            if len(below) > depth:
                folder = "/".join([top, *below[:depth]])
                self._folders.setdefault(folder, {})[below[depth]] = size

    @cached_property
    def runs(self) -> list[StoredRun]:
        """All runs and sweeps in the storage, sorted by kind and name."""
        trials = {
            name.removeprefix(_TRIALS).removesuffix(".json"): (folder.partition("/")[2], name)
            for folder, files in self._folders.items()
            if folder.startswith(f"{SWEEPS}/")
            for name in files
            if name.startswith(_TRIALS) and name.endswith(".json")
        }
        found = []
        for folder in sorted(self._folders):
            kind, _, name = folder.partition("/")
            note = {RUNS: RUN_FILE, SWEEPS: SWEEP_FILE}.get(kind)
            settings = self._settings(folder, note) if note else {}
            if "name" not in settings:
                continue
            sweep, record = trials.get(name, (None, "")) if kind == RUNS else (None, "")
            trial = {} if sweep is None else self._json(f"{SWEEPS}/{sweep}/{record}")
            is_stopped = trial.get("state") == "stopped"
            found.append(self._run(kind, name, settings, sweep, is_stopped))
        return found

    def trials(self, sweep: StoredRun) -> list[StoredRun]:
        """Return the stored runs of a sweep's trials; empty for a run."""
        return [run for run in self.runs if sweep.kind == SWEEPS and run.sweep == sweep.name]

    @cached_property
    def prepared(self) -> list[PreparedFolder]:
        """Folders of prepared data and plans, sorted by path; folders that never have a manifest
        are left out.
        """
        places = [f for f in sorted(self._folders) if f.partition("/")[0] in _PREPARED]
        aside = ("data/vectors/", "data/answers/", "data/given/")
        return [self._prepared(place) for place in places if not place.startswith(aside)]

    @cached_property
    def vectors(self) -> dict[str, int]:
        """Path of each file with a teacher's cached vectors → bytes."""
        return {
            path: size
            for path, size in self.files.items()
            if path.startswith("data/vectors/")
            and re.fullmatch(r"[0-9a-f]{32}\..+\.np[yz]", path.rpartition("/")[2])
        }

    def used(self, runs: Iterable[StoredRun]) -> dict[str, list[str]]:
        """Path of each data folder and vector file in use → names of the runs that use it."""
        found: dict[str, list[str]] = {}
        for run in runs:
            for path in self._uses(run):
                found.setdefault(path, []).append(run.name)
        return found

    def unused(self, runs: Iterable[StoredRun], going: Iterable[StoredRun] = ()) -> dict[str, int]:
        """Path of each finished folder and vector file that no run uses → bytes.

        Args:
            runs: those that stay.
            going: others, whose data counts as unused however new it is.
        """
        free = self._free(runs)
        new = self._new(free.keys() - self.used(going).keys())
        return {path: size for path, size in free.items() if path not in new}

    def new(self) -> set[str]:
        """Paths of unused data that was written too recently to be removed."""
        free = self._free(self.runs).keys()
        return self._new(set(free)) & free

    def _free(self, runs: Iterable[StoredRun]) -> dict[str, int]:
        used = self.used(runs)
        folders = {one.place: one.num_bytes for one in self.prepared if one.state != "unfinished"}
        return {path: n for path, n in {**self.vectors, **folders}.items() if path not in used}

    def _new(self, paths: set[str]) -> set[str]:
        """Select the paths that were written recently, and all data that these refer to."""
        folders = [one for one in self.prepared if one.state == "finished" and one.place in paths]
        fresh = [one for one in folders if self._is_fresh(one.place, NEW_SECONDS)]
        vectors = paths & self.vectors.keys()
        written = self._written({path.rpartition("/")[0] for path in vectors})
        old = time.time_ns() - NEW_SECONDS * 1e9
        new = {path for path in vectors if written.get(path, old) > old}
        return new.union((one.place for one in fresh), self._reached(one.identity for one in fresh))

    def _written(self, folders: Iterable[str]) -> dict[str, int]:
        """Path of each file in folders → time of its last write, in nanoseconds since 1970."""
        return {
            f"{folder}/{name}": written
            for folder in folders
            for name, written in file_times(join(self.storage, folder)).items()
        }

    @cached_property
    def temporary(self) -> dict[str, int]:
        """Path of each half-written file of a killed writer → bytes."""
        named = {
            path: size
            for path, size in self.files.items()
            if _TEMPORARY.fullmatch(path.rpartition("/")[2])
        }
        written = self._written({path.rpartition("/")[0] for path in named})
        now = time.time()
        return {
            path: size
            for path, size in named.items()
            if now - written.get(path, now * 1e9) / 1e9 > STALE_SECONDS
        }

    def below(self, folder: str) -> dict[str, int]:
        """Path of each file below a folder → bytes."""
        return self._folders.get(folder, {})

    def others(self) -> dict[str, int]:
        """Path of every file of no other class → bytes: files without a manifest, evaluation
        results, small models.
        """
        known = {f"{run.kind}/{run.name}" for run in self.runs}
        known |= {folder.place for folder in self.prepared}
        sizes = {
            name: size
            for name, size in file_sizes(self.storage, recursive=False).items()
            if name == _DATABASE
        }
        for path, size in self.files.items():
            folder = next((f for f in _parents(path) if f in known), None)
            if folder is None and path not in self.vectors and not path.endswith(".lock"):
                top, _, rest = path.partition("/")
                place = f"{top}/{rest.partition('/')[0]}" if "/" in rest else top
                sizes[place] = sizes.get(place, 0) + size
        return dict(sorted(sizes.items()))

    def at_work(self) -> list[str]:
        """Names of runs and sweeps on which a job is working now, also before their folder
        exists.

        Raises:
            StorageError: the storage cannot be read.
        """
        claims = file_sizes(join(self.storage, LEASES), recursive=True)
        held = {tuple(path.split("/")[:2]) for path in claims if path.count("/") == 2}
        return sorted(name for kind, name in held if self._is_locked(kind, name))

    def _is_locked(self, kind: str, name: str) -> bool:
        """Whether a running job holds the lease of a run or a sweep."""
        times = file_times(join(self.storage, LEASES, kind, name))
        return any(time.time_ns() - written < LEASE_SECONDS * 1e9 for written in times.values())

    def being_made(self) -> list[str]:
        """Paths of unfinished data folders that were written to recently."""
        unfinished = [one for one in self.prepared if one.state == "unfinished"]
        return [one.place for one in unfinished if self._is_fresh(one.place, STALE_SECONDS)]

    def _is_fresh(self, place: str, seconds: float) -> bool:
        times = self._written({f"{place}/{name}".rpartition("/")[0] for name in self.below(place)})
        return bool(times) and time.time() - max(times.values()) / 1e9 < seconds

    def _settings(self, folder: str, note: str) -> Mapping[str, Any]:
        """Read a folder's settings as plain text; empty if they are missing or unreadable."""
        if note not in self.below(folder):
            return {}
        try:
            values = read_yaml(self._text(f"{folder}/{note}"))
        except yaml.YAMLError:
            return {}
        return values if isinstance(values, Mapping) else {}

    def _run(
        self,
        kind: str,
        name: str,
        settings: Mapping[str, Any],
        sweep: str | None,
        is_stopped: bool,
    ) -> StoredRun:
        folder = f"{kind}/{name}"
        below = self.below(folder)
        parts = dict.fromkeys(PARTS, 0)
        for path, size in below.items():
            parts[part_of(path)] += size
        ends = self._lines(f"{folder}/{_OUTBOX}")
        last = [{}, *(one for one in ends if one.get("kind") == "status")][-1]
        state: State = "stopped" if is_stopped else "interrupted"
        if last.get("status") in ("FINISHED", "FAILED"):
            state = "done" if last["status"] == "FINISHED" else "failed"
        if self._is_locked(kind, name):
            state = "running"
        written = last.get("time")
        if written is None:
            written = max(file_times(join(self.storage, folder)).values(), default=0) / 1e9
        named = [n for n in (RUN_FILE, SWEEP_FILE, PLANS_FILE, _SWEPT) if n in below]
        tracked = self._json(f"{folder}/{_TRACKING}")
        sent = self._text(f"{folder}/{_SENT}").strip() if _SENT in below else "0"
        placement = settings.get("placement") or {}
        return StoredRun(
            kind=kind,
            name=name,
            state=state,
            written=float(written),
            parts=parts,
            text="\n".join(self._text(f"{folder}/{n}") for n in named),
            names_data=kind == SWEEPS or PLANS_FILE in below,
            keeps_states=placement.get("keep_states") == "true",
            tracked=TrackedRun.of(tracked),
            is_sent=sent.isdecimal() and int(sent) >= len(ends),
            sweep=sweep,
        )

    def _prepared(self, place: str) -> PreparedFolder:
        below = self.below(place)
        size = sum(below.values())
        note = next((name for name in (MANIFEST, REMOVED) if name in below), None)
        manifest = {} if note is None else self._json(f"{place}/{note}")
        if not manifest:
            return PreparedFolder(place, size, "unfinished", frozenset())
        content = {name: value for name, value in manifest.items() if name != "examples"}
        text = json.dumps(content)
        names = set(_IDENTITY.findall(text))
        inputs = manifest.get("inputs")
        if isinstance(inputs, dict) and isinstance(inputs.get("corpus"), dict):
            names.add(fingerprint(inputs["corpus"]))  # of the folder of documents
        parts = json.dumps(manifest.get("parts", []))
        files = manifest.get("files") if place.startswith(f"data/{_STORES}/") else None
        pointed = [name for role in dict(files or {}).values() for name, _ in role]
        return PreparedFolder(
            place,
            size,
            "finished" if note == MANIFEST else "removed",
            frozenset(names),
            frozenset(_DIGEST.findall(parts)),
            frozenset(f"data/{name}" for name in pointed),
        )

    @cached_property
    def _by_identity(self) -> dict[str, PreparedFolder]:
        return {one.identity: one for one in self.prepared if one.state == "finished"}

    @cached_property
    def _vectors_of(self) -> dict[str, list[str]]:
        """Digest of a data file → paths of the vector files computed from it."""
        found: dict[str, list[str]] = {}
        for path in self.vectors:
            found.setdefault(path.rpartition("/")[2].partition(".")[0], []).append(path)
        return found

    def _uses(self, run: StoredRun) -> set[str]:
        """Collect the paths of all data folders that a run refers to, directly or not, and their
        vector files.
        """
        return self._reached(_IDENTITY.findall(run.text))

    def _reached(self, identities: Iterable[str]) -> set[str]:
        """Collect the folders with these fingerprints, the folders that they were made from, and
        their vector files.
        """
        known = self._by_identity
        waiting = set(identities) & known.keys()
        seen: set[str] = set()
        while waiting:
            seen |= waiting
            waiting = {n for one in waiting for n in known[one].names} & known.keys() - seen
        folders = [known[one] for one in seen]
        vectors = {
            path
            for one in folders
            for part in one.digests
            for path in self._vectors_of.get(part, ())
        }
        return {one.place for one in folders}.union(vectors, *(one.files for one in folders))

    def _text(self, path: str) -> str:
        return read_bytes(join(self.storage, path)).decode("utf-8", "replace")

    def _json(self, path: str) -> dict[str, Any]:
        """Read a JSON object from a file; empty if the file is missing or unreadable."""
        if path not in self.files:
            return {}
        try:
            values = json.loads(self._text(path))
        except (ArtifactError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _lines(self, path: str) -> list[dict[str, Any]]:
        """Read a file with one JSON object on each line; an incomplete last line is skipped."""
        if path not in self.files or not exists(join(self.storage, path)):
            return []
        found = []
        for line in self._text(path).splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                found.append(values)
        return found


def _parents(path: str) -> list[str]:
    """Yield the parent folders of a file, outermost first."""
    names = path.split("/")[:-1]
    return ["/".join(names[: n + 1]) for n in range(len(names))]
