"""Writing of a batch plan: rows are ordered, scattered, gathered into files; the manifest comes
last.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from rayembed.assets.storage import (
    exists,
    is_remote,
    join,
    open_storage,
    remove_folder,
)
from rayembed.config.document import fingerprint
from rayembed.data.exchange import exchange
from rayembed.data.index import scratch_of_index
from rayembed.data.parts import Part, remedy
from rayembed.data.plan.batch_plan import MANIFEST, VERSION, BatchPlan, check_files, write_manifest
from rayembed.data.plan.files import ROWS_PER_FILE, Gather, SendRows, blocks_of, num_blocks
from rayembed.data.plan.order import PlanConfig, describe, draw_rows, usable_rows
from rayembed.data.plan.places import BYTES_OF_A_PLACE, PlaceWriter
from rayembed.data.plan.scratch import scratch_folder
from rayembed.data.plan.teacher_scores import SCORES_COLUMN, check_scored
from rayembed.data.work_items import Execute, in_process, run_resumable
from rayembed.errors import ArtifactError, DataError

log = logging.getLogger(__name__)

_BYTES_OF_A_ROW = 44
"""Bytes of scratch that sorting takes for each row: see `sorted_rows`."""


def write_plan(
    folder: str,
    parts: Mapping[str, Sequence[Part]],
    config: PlanConfig,
    *,
    inputs: Mapping[str, str] | None = None,
    batch_pairs: Mapping[str, int] | None = None,
    execute: Execute = in_process,
) -> BatchPlan:
    """Write a plan into `folder`; an existing one with the same inputs is reused.

    A local folder appears when it is complete, and a lock beside it admits one writer at a time:
    others that want the same plan wait and reuse it. In object storage the manifest is written last
    and nothing is locked: let one run finish a plan before others start.

    Args:
        parts: of each data set that `config.weights` names.
        inputs: what the parts were made of, for the manifest and to know the plan again.
        batch_pairs: of data sets whose rows stand in clustered batches, part after part: the rows
            of a batch. The policy `clustered` needs it of all.

    Raises:
        DataError: a data set is empty, has too few rows for a batch, has no clustered batches
            where the policy wants some or has them of another size, or has rows that could learn
            from nothing; before any file but the lock is written. Or the loss reads a teacher's
            scores, and no row that is drawn has any.
    """
    datasets = sorted(config.weights)
    wanted = fingerprint(
        {
            "version": VERSION,
            "config": config.values(),
            "parts": {name: [part.digest for part in parts[name]] for name in datasets},
            "inputs": dict(inputs or {}),
        }
    )
    if (found := _finished(folder, wanted)) is not None:
        return found
    with one_at_a_time(folder):
        if (found := _finished(folder, wanted)) is not None:
            return found
        return _write(folder, parts, config, inputs, batch_pairs, execute, wanted)


@contextmanager
def one_at_a_time(folder: str) -> Iterator[None]:
    """Lock beside a local folder against concurrent writers; no lock for remote folders."""
    if is_remote(folder):
        yield
        return
    lock = Path(f"{open_storage(folder)[1].rstrip('/')}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield


def _finished(folder: str, wanted: str) -> BatchPlan | None:
    if not exists(join(folder, MANIFEST)):
        return None
    found = BatchPlan.open(folder)
    if found.manifest["made_of"] != wanted:
        raise ArtifactError(f"{folder!r} holds a plan of other data or settings; remove it")
    check_files(folder, found.manifest)
    return found


def _write(
    folder: str,
    parts: Mapping[str, Sequence[Part]],
    config: PlanConfig,
    inputs: Mapping[str, str] | None,
    batch_pairs: Mapping[str, int] | None,
    execute: Execute,
    wanted: str,
) -> BatchPlan:
    datasets = sorted(config.weights)
    began = time.monotonic()
    work = folder if is_remote(folder) else f"{folder.rstrip('/')}.{wanted}.partial"
    steps_per_file = max(1, ROWS_PER_FILE // config.global_pairs)
    sent = join(work, "scattered")
    rows = sum(part.rows for name in datasets for part in parts[name])
    most = config.steps_of(rows)
    size = _BYTES_OF_A_ROW * rows + BYTES_OF_A_PLACE * most * config.global_pairs
    size += max(scratch_of_index(parts[name]) for name in datasets)
    with scratch_folder(f"the order of stage {config.key!r}", size) as scratch:
        usable = usable_rows(parts, config, batch_pairs or {}, scratch)
        num_steps = config.steps_of(sum(of.count for of in usable.values()))
        asked, config = config, replace(config, num_steps=num_steps)
        every = [part for name in usable for part in parts[name]]
        with PlaceWriter(scratch, sent, every) as writer:
            draws = draw_rows(usable, config, writer.add)
            places = writer.finish()
        told = describe(usable, draws, config, parts)
    send = SendRows(config.global_pairs, steps_per_file, config.num_negatives)
    count = num_blocks(config.num_steps, steps_per_file)
    buckets, placed = exchange(sent, f"plan {config.key} scatter", send, places, count, execute)
    blocks = blocks_of(buckets, config.num_steps, steps_per_file)
    gather = Gather(work, buckets, config.global_pairs, config.columns)
    gathered = run_resumable(work, f"plan {config.key} gather", gather, blocks, execute)
    steps = [step for result in gathered for step in result["steps"]]
    for name in datasets:
        rows, positives, trained = (
            sum(int(of[key]) for of in placed if of["dataset"] == name)
            for key in ("rows", "positives", "trained")
        )
        if positives > rows:
            told[name]["positives"] = {"all": positives, "trained": trained}
        written = sum(int(result["rows_by_dataset"].get(name, 0)) for result in gathered)
        assert written == told[name]["drawn"], (name, written, told[name])
        if SCORES_COLUMN in config.columns:
            counts = [result["scores_by_dataset"].get(name, {}) for result in gathered]
            told[name]["scores"] = {
                kind: sum(int(of.get(kind, 0)) for of in counts) for kind in ("scored", "unscored")
            }
    assert len(steps) == config.num_steps
    assert sum(of["drawn"] for of in told.values()) == config.num_steps * config.global_pairs
    try:
        check_scored(config.key, config.columns, told)
    except DataError:
        remove_folder(work)
        raise
    content = "".join([*steps, *config.teachers])
    manifest = {
        "version": VERSION,
        **asked.values(),
        "num_steps": num_steps,
        "steps_per_file": steps_per_file,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:12],
        "made_of": wanted,
        "inputs": dict(inputs or {}),
        "datasets": told,
        "seconds": round(time.monotonic() - began, 3),
    }
    return _finish(folder, work, manifest)


def _finish(folder: str, work: str, manifest: Mapping[str, Any]) -> BatchPlan:
    for rest in ("scattered", "units"):
        remove_folder(join(work, rest))
    write_manifest(work, manifest)
    if work != folder:
        try:
            Path(open_storage(work)[1]).replace(open_storage(folder)[1])
        except OSError as error:  # what lies there has no manifest
            raise ArtifactError(
                f"cannot move the batch plan to {folder!r}: {error}. "
                f"{remedy(join(folder, MANIFEST))}"
            ) from error
    log.info("batch plan %s: %d steps", manifest["fingerprint"], manifest["num_steps"])
    return BatchPlan.open(folder)
