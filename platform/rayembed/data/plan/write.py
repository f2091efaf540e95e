"""Write a batch plan: rows are ordered, sent to their files and gathered there; the manifest is
written last.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rayembed.assets.storage import join, remove_folder
from rayembed.assets.store import Entry
from rayembed.config.document import fingerprint
from rayembed.data.engine.exchange import exchange
from rayembed.data.engine.parts import Part
from rayembed.data.engine.work_items import Execute, in_process, run_resumable
from rayembed.data.plan.batch_plan import CODE_VERSION, BatchPlan, check_files, finish
from rayembed.data.plan.files import ROWS_PER_FILE, Gather, SendRows, blocks_of, num_blocks
from rayembed.data.plan.order import PlanConfig, describe, draw_rows, usable_rows
from rayembed.data.plan.scratch import BYTES_OF_A_PLACE, PlaceWriter, scratch_folder
from rayembed.data.plan.teacher_scores import SCORES_COLUMN, check_scored
from rayembed.errors import ArtifactError, DataError

log = logging.getLogger(__name__)

_BYTES_OF_A_ROW = 44
"""Bytes of scratch that sorting needs for each row: see `sorted_rows`."""


def write_plan(
    folder: str,
    parts: Mapping[str, Sequence[Part]],
    config: PlanConfig,
    *,
    inputs: Mapping[str, str] | None = None,
    batch_pairs: Mapping[str, int] | None = None,
    execute: Execute = in_process,
) -> BatchPlan:
    """Write a plan into `folder`, or reuse the plan there if it has the same inputs.

    One process at a time writes a local folder: others that want the same plan wait and reuse it.
    In object storage nothing is locked, and the plan that is finished first counts.

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
            "code": CODE_VERSION,
            "config": config.values(),
            "parts": {name: [part.digest for part in parts[name]] for name in datasets},
            "inputs": dict(inputs or {}),
        }
    )
    entry = Entry(folder)
    make = partial(_write, entry, parts, config, inputs, batch_pairs, execute, wanted)
    entry.get_or_make(make, alone=True)
    plan = BatchPlan.open(folder)
    if plan.manifest["made_of"] != wanted:
        raise ArtifactError(
            f"the folder {folder!r} holds a batch plan for other data or settings; remove the "
            "folder"
        )
    check_files(folder, plan.manifest)
    return plan


def _write(
    entry: Entry,
    parts: Mapping[str, Sequence[Part]],
    config: PlanConfig,
    inputs: Mapping[str, str] | None,
    batch_pairs: Mapping[str, int] | None,
    execute: Execute,
    wanted: str,
) -> Mapping[str, Any]:
    datasets = sorted(config.weights)
    began = time.monotonic()
    steps_per_file = max(1, ROWS_PER_FILE // config.global_pairs)
    sent = join(entry.working, "scattered")
    rows = sum(part.rows for name in datasets for part in parts[name])
    most = config.steps_of(rows)
    size = _BYTES_OF_A_ROW * rows + BYTES_OF_A_PLACE * most * config.global_pairs
    with scratch_folder(f"the order of stage {config.key!r}", size) as scratch:
        usable = usable_rows(parts, config, batch_pairs or {}, scratch)
        num_steps = config.steps_of(sum(of.count for of in usable.values()))
        asked, config = config, replace(config, num_steps=num_steps)
        every = [part for name in usable for part in parts[name]]
        writer = PlaceWriter(scratch, sent, every)
        draws = draw_rows(usable, config, writer.add)
        places = writer.finish()
        told = describe(usable, draws, config, parts)
    send = SendRows(config.global_pairs, steps_per_file, config.num_negatives, config.num_positives)
    count = num_blocks(config.num_steps, steps_per_file)
    buckets, placed = exchange(sent, f"plan {config.key} scatter", send, places, count, execute)
    blocks = blocks_of(buckets, config.num_steps, steps_per_file)
    gather = Gather(entry.folder, buckets, config.global_pairs, config.columns)
    what = f"plan {config.key} gather"
    gathered = run_resumable(entry.working, what, gather, blocks, execute)
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
        remove_folder(entry.folder)
        raise
    content = "".join([*steps, *config.teachers])
    manifest = {
        "code": CODE_VERSION,
        **asked.values(),
        "num_steps": num_steps,
        "steps_per_file": steps_per_file,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:12],
        "made_of": wanted,
        "inputs": dict(inputs or {}),
        "datasets": told,
        "seconds": round(time.monotonic() - began, 3),
    }
    log.info("batch plan %s is ready: %d steps", manifest["fingerprint"], num_steps)
    return finish(entry, manifest)
