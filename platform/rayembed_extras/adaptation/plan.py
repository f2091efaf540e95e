"""Plan of an adaptation: which sequences each step trains on, and in which slot of the
batch.

It depends on the sequences, α and the seed, not on workers: worker r of W takes the slots [r·G/W,
(r+1)·G/W) of each step, so that batches are the same for every W and a run can resume at any step
with any W.

    storage/plans/adapt-<fingerprint>/steps-*.parquet, manifest.json

Batches that are held out stand behind the last step, as steps of their own.

G sequences of a global batch, L languages, n sequences in all.
"""

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.storage import join
from rayembed.assets.store import Entry
from rayembed.config.document import fingerprint
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.exchange import Buckets, Sent, exchange
from rayembed.data.engine.parts import Part, read_table
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.plan.batch_plan import (
    StepFiles,
    check_files,
    finish,
    read_manifest,
    write_steps,
)
from rayembed.data.plan.files import (
    ROWS_PER_FILE,
    Block,
    blocks_of,
    num_blocks,
    placed_rows,
    read_block,
)
from rayembed.data.plan.policies import blended
from rayembed.data.plan.sampling import DatasetRows, shares
from rayembed.data.plan.scratch import BYTES_OF_A_PLACE, PartPlaces, PlaceWriter, scratch_folder
from rayembed.errors import DataError
from rayembed_extras.adaptation.settings import Adaptation
from rayembed_extras.adaptation.writer import SCHEMA

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Version of the plan; raise it when the same sequences yield another plan or layout on disk."""

PLAN_SCHEMA = pa.schema([("step", pa.int64()), ("slot", pa.int32()), *SCHEMA])

_KIND = "sequences"
_KEY = "adapt"

_TOKENS_OF_A_TASK = 1 << 24
"""Tokens at their plan positions that one task writes: 64 MiB."""


@dataclass(frozen=True)
class SequencePlan:
    """A finished plan on disk; reads the sequences of each step. Picklable; opens its files when
    they are read.
    """

    files: StepFiles
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str) -> "SequencePlan":
        """Open the plan in a folder.

        Raises:
            ArtifactError: no finished plan of this version there, or a broken one.
        """
        manifest = read_manifest(folder, CODE_VERSION, _KIND)
        files = StepFiles(folder, manifest["global_sequences"], manifest["steps_per_file"])
        return cls(files, manifest)

    @property
    def num_steps(self) -> int:
        """Number of steps in the plan."""
        return int(self.manifest["num_steps"])

    @property
    def held_out(self) -> range:
        """Step indices of the held-out batches."""
        return range(self.num_steps, self.num_steps + int(self.manifest["held_out"]))

    @property
    def global_sequences(self) -> int:
        """Number of sequences in each step, over all workers."""
        return self.files.rows_per_step

    @property
    def fingerprint(self) -> str:
        """Content hash of the plan in hexadecimal digits; depends on every sequence and its
        position.
        """
        return str(self.manifest["fingerprint"])

    @property
    def languages(self) -> list[str]:
        """Language codes, in the order of their indices."""
        return [str(recorded["language"]) for recorded in self.language_counts]

    @property
    def language_counts(self) -> list[dict[str, Any]]:
        """Available and drawn sequences of each language, from the manifest."""
        recorded: list[dict[str, Any]] = self.manifest["languages"]
        return recorded

    def slots(self, worker: int, num_workers: int) -> range:
        """Range of batch slots that a worker trains in every step.

        Raises:
            DataError: the workers cannot share a batch equally.
        """
        if self.global_sequences % num_workers:
            raise DataError(
                f"{num_workers} workers cannot share batches of {self.global_sequences} sequences "
                f"equally; use a number of workers that divides {self.global_sequences}"
            )
        share = self.global_sequences // num_workers
        return range(worker * share, (worker + 1) * share)

    def read(self, step: int, slots: range) -> tuple[list[np.ndarray], list[str]]:
        """Read token ids (T,) int32 and language of the sequences in the given slots of a
        step.

        Raises:
            ArtifactError: a file of the plan is missing or broken.
        """
        names = ["language", "input_ids"]
        table = self.files.read(step, slots.start, slots.stop, names)
        ids = table["input_ids"].combine_chunks()
        sequences = [ids[row].values.to_numpy() for row in range(len(ids))]
        return sequences, table["language"].to_pylist()


def write_sequence_plan(
    context: PipelineContext, run: Adaptation, prepared: Mapping[str, DatasetArtifact]
) -> SequencePlan:
    """Write the plan of a run, or reuse an existing one that was made from the same inputs.

    Args:
        prepared: set of texts → folder of its sequences.

    Raises:
        DataError: too few sequences for a batch, in all or of a language.
    """
    held_out = run.training.held_out
    settings = {
        "num_steps": run.training.steps,
        "held_out": 0 if held_out is None else held_out.batches,
        "global_sequences": run.training.global_sequences,
        "language_alpha": run.corpus.language_alpha,
        "seed": run.seed,
    }
    inputs = {name: one.fingerprint for name, one in sorted(prepared.items())}
    named = fingerprint({"code": CODE_VERSION, **settings, "inputs": inputs})
    folder = join(context.storage, "plans", f"{_KEY}-{named}")
    entry, recorded = Entry(folder), {**settings, "inputs": inputs}
    entry.get_or_make(lambda: _write(entry, context, run, prepared, recorded), alone=True)
    plan = SequencePlan.open(folder)
    check_files(folder, plan.manifest)
    return plan


def _write(
    entry: Entry,
    context: PipelineContext,
    run: Adaptation,
    prepared: Mapping[str, DatasetArtifact],
    recorded: Mapping[str, Any],
) -> Mapping[str, Any]:
    began = time.monotonic()
    sequences = run.training.global_sequences
    parts = [part for name in sorted(prepared) for part in prepared[name].parts]
    pool = read_pool(parts)
    trained, held_out = order_sequences(
        pool,
        sequences,
        run.training.steps,
        run.seed,
        run.corpus.language_alpha,
        held_out=recorded["held_out"],
    )
    order = np.concatenate([trained, held_out])
    steps_per_file = max(1, ROWS_PER_FILE // sequences)
    num_files = num_blocks(len(order), steps_per_file)
    sent = join(entry.working, "scattered")
    # Rows of a small language stand in many places, and a task holds a copy for each.
    most = max(1, _TOKENS_OF_A_TASK // run.corpus.max_length)
    with scratch_folder("the order of sequences", BYTES_OF_A_PLACE * order.size) as scratch:
        places = PlaceWriter(scratch, sent, parts, most)
        places.add(order.ravel(), np.arange(order.size))
        items = places.finish()
    scatter = _Scatter(steps_per_file, sequences)
    buckets, _ = exchange(sent, "plan adapt scatter", scatter, items, num_files, context.execute)
    blocks = blocks_of(buckets, len(order), steps_per_file)
    gather = _Gather(entry.folder, buckets, sequences)
    gathered = run_resumable(entry.working, "plan adapt gather", gather, blocks, context.execute)
    digests = "".join(digest for result in gathered for digest in result["steps"])
    manifest = {
        "code": CODE_VERSION,
        "kind": _KIND,
        **recorded,
        "steps_per_file": steps_per_file,
        "fingerprint": hashlib.sha256(digests.encode()).hexdigest()[:12],
        "languages": _languages(pool, trained, held_out, prepared),
        "seconds": round(time.monotonic() - began, 3),
    }
    log.info("prepared the sequence plan %s: %d steps", manifest["fingerprint"], run.training.steps)
    return finish(entry, manifest)


@dataclass(frozen=True)
class SequencePool:
    """Content hashes and languages of all sequences, about 12 bytes each, from which the order is
    computed.
    """

    hash: np.ndarray
    """(n,) int64 content hash, part after part."""
    language: np.ndarray
    """(n,) int32 index into `languages`."""
    languages: list[str]
    """Language codes in their order."""


def read_pool(parts: Sequence[Part]) -> SequencePool:
    """Read the hashes and languages of all sequences.

    Raises:
        ArtifactError: a part is missing or broken.
    """
    tables = [read_table(part.path, ["hash", "language"]) for part in parts]
    table = pa.concat_tables(tables).combine_chunks()
    languages = sorted(pc.unique(table["language"]).to_pylist())
    places = pc.index_in(table["language"], pa.array(languages, pa.string()))
    return SequencePool(table["hash"].to_numpy(), places.to_numpy().astype(np.int32), languages)


def order_sequences(
    pool: SequencePool,
    global_sequences: int,
    num_steps: int,
    seed: int,
    alpha: float,
    held_out: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (num_steps, G) training and (held_out, G) held-out int64 indices of sequences in the
    pool.

    A language with m of the sequences has the share m^α / Σ m^α of every batch, exact to one
    sequence over any number of steps. Its sequences are sampled by epoch in seeded permutations of
    a content-based order; none occurs twice in a batch. No sequence that equals a held-out one is
    in the first array. Of a language that would lose more than half nothing is held out.

    Raises:
        DataError: a language has fewer sequences than a batch takes of it, or nothing can be held
            out.
    """
    everything = np.arange(len(pool.hash))
    if not held_out:
        order = _order(pool, everything, global_sequences, num_steps, seed, alpha, _KEY)
        return order, np.empty((0, global_sequences), dtype=np.int64)
    there = np.bincount(pool.language, minlength=len(pool.languages))
    small = np.zeros(len(pool.languages), dtype=bool)
    while True:
        among = np.flatnonzero(~small[pool.language])
        if not len(among):
            raise DataError(
                f"training.held_out.batches={held_out} batches of {global_sequences} sequences "
                f"would take more than half of the sequences of every language ({len(everything)} "
                "sequences in all); lower training.held_out.batches, set training.held_out=null, "
                "or add texts"
            )
        kept = _order(pool, among, global_sequences, held_out, seed, alpha, "held-out")
        rest = np.flatnonzero(~np.isin(pool.hash, pool.hash[kept.ravel()]))
        left = np.bincount(pool.language[rest], minlength=len(pool.languages))
        more = (2 * left < there) & ~small
        if not more.any():
            break
        small |= more
    if small.any():
        codes = ", ".join(code for code, one in zip(pool.languages, small, strict=True) if one)
        log.warning("languages with too few sequences for a held-out part get no score: %s", codes)
    return _order(pool, rest, global_sequences, num_steps, seed, alpha, _KEY), kept


def _order(
    pool: SequencePool,
    among: np.ndarray,
    global_sequences: int,
    num_steps: int,
    seed: int,
    alpha: float,
    key: str,
) -> np.ndarray:
    """Return (num_steps, G) int64 indices into the pool, drawn from the given indices."""
    by_content = among[np.lexsort((among, pool.hash[among]))]
    numbers = np.unique(pool.language[among])
    of_language = [by_content[pool.language[by_content] == number] for number in numbers]
    codes = [pool.languages[number] for number in numbers]
    sizes = [len(rows) for rows in of_language]
    share = shares([1.0] * len(sizes), sizes, 1 / alpha)
    for code, size, part in zip(codes, sizes, share.tolist(), strict=True):
        needed = min(global_sequences, math.ceil(part * global_sequences - 1e-9))
        if size < needed:
            raise DataError(
                f"the language {code!r} has {size} sequences, not counting those of "
                f"training.held_out, but each batch of {global_sequences} takes up to {needed} of "
                f"them (share {part:.4g}); lower training.global_sequences, raise "
                "corpus.language_alpha, or add texts"
            )
    rows = [
        DatasetRows(code, 1.0, pool.hash[places])
        for code, places in zip(codes, of_language, strict=True)
    ]
    order = np.empty((num_steps, global_sequences), dtype=np.int64)
    batches = blended(rows, global_sequences, num_steps, seed, key, 1 / alpha)
    for step, batch in enumerate(batches):
        for number, places in enumerate(of_language):
            mine = batch.dataset == number
            order[step, mine] = places[batch.row[mine]]
    return order


@dataclass(frozen=True)
class _Scatter:
    """Task that copies a part's sequences to the plan files in which their steps are stored."""

    steps_per_file: int
    global_sequences: int

    def __call__(self, item: PartPlaces) -> Sent:
        table = read_table(item.part.path)
        return placed_rows(table, item, self.global_sequences, self.steps_per_file)


@dataclass(frozen=True)
class _Gather:
    """Task that writes one plan file, with its sequences sorted by step and slot."""

    folder: str
    buckets: Buckets
    global_sequences: int

    def __call__(self, block: Block) -> Result:
        table = read_block(self.buckets, block, self.global_sequences).cast(PLAN_SCHEMA)
        write_steps(
            self.folder,
            table,
            first_step=block.first_step,
            rows_per_step=self.global_sequences,
        )
        hashes = table["hash"].to_numpy().reshape(-1, self.global_sequences)
        return {"steps": [xxhash.xxh3_64_hexdigest(row.tobytes()) for row in hashes]}


def _languages(
    pool: SequencePool,
    trained: np.ndarray,
    held_out: np.ndarray,
    prepared: Mapping[str, DatasetArtifact],
) -> list[dict[str, Any]]:
    """Count available, drawn and held-out sequences of each language, for the manifest."""
    rest = np.flatnonzero(~np.isin(pool.hash, pool.hash[held_out.ravel()]))
    sizes, left, drawn, kept = (
        np.bincount(pool.language[rows], minlength=len(pool.languages))
        for rows in (np.arange(len(pool.language)), rest, trained.ravel(), held_out.ravel())
    )
    recorded = []
    for place, code in enumerate(pool.languages):
        of_texts = [one.manifest["languages"].get(code, {}) for one in prepared.values()]
        counts = {
            name: sum(int(found.get(name, 0)) for found in of_texts)
            for name in ("texts", "tokens", "tokens_cut")
        }
        recorded.append(
            {
                "language": code,
                **counts,
                "sequences": int(sizes[place]),
                "share": round(float(sizes[place] / sizes.sum()), 6),
                "drawn": int(drawn[place]),
                "drawn_share": round(float(drawn[place] / drawn.sum()), 6),
                "epochs": round(float(drawn[place] / left[place]), 3),
                "held_out": int(kept[place]),
            }
        )
        if not drawn[place]:
            log.warning("no training step uses a sequence of the language %s", code)
    return recorded
