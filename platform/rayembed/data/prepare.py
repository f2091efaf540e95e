"""From a run's settings to the batch plans of its stages, in folders named by their inputs.

    storage/data/records/<data set>-<fingerprint>/    parts, manifest.json
    storage/data/vectors/<teacher's settings>/        float16 vectors, reused by all runs
    storage/data/mined/<data set>-<fingerprint>/      parts, manifest.json
    storage/plans/<stage>-<fingerprint>/              the batch plan, audit.md

A folder is finished when its manifest is there, which is written last; a finished one is taken as
it is, an unfinished one goes on where it stopped. Nothing here knows Ray.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.data import DatasetConfig, MiningConfig, PairsSource, WikipediaSource
from rayembed.config.run import Run, fingerprint
from rayembed.data.mining.tasks import EmbedPart, MinePart, PartUnit
from rayembed.data.mining.teacher import Encoder, embedding_settings, load_teacher
from rayembed.data.parts import ROWS_PER_PART, Part, read_index
from rayembed.data.plan.audit import write_audit
from rayembed.data.plan.batch_plan import PlanConfig, write_plan
from rayembed.data.sources.files import Piece, check_columns, list_pieces
from rayembed.data.sources.tasks import (
    HELD_OUT_TEXT,
    ArticleRange,
    ConvertArticles,
    ConvertPairs,
    HeldOut,
    KeepRows,
    PieceUnit,
    RowsOfPart,
    hold_out,
    select,
    with_source_path,
)
from rayembed.data.sources.wikipedia import read_articles
from rayembed.data.units import Execute, Result, add_up, in_process, run_units
from rayembed.errors import ConfigError, DataError
from rayembed.models.fingerprints import weights_fingerprint

log = logging.getLogger(__name__)

CODE_VERSION = 2
"""Of converting and mining; raised whenever they make other rows of the same inputs."""

_EXAMPLES_SHOWN = 5


@dataclass(frozen=True)
class Teaching:
    """How the teacher of mining is found and loaded."""

    load: Callable[[MiningConfig, str], Encoder] = load_teacher
    fingerprint: Callable[[str], str] = lambda reference: weights_fingerprint(
        resolve_model(reference)
    )


@dataclass(frozen=True)
class Prepared:
    """A finished folder of records."""

    folder: str
    manifest: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """Of its inputs."""
        return str(self.manifest["fingerprint"])

    @property
    def parts(self) -> list[Part]:
        """Its files."""
        return [
            Part(join(self.folder, "parts", name), rows) for name, rows in self.manifest["parts"]
        ]


def prepare(
    run: Run, storage: str, execute: Execute = in_process, teaching: Teaching | None = None
) -> dict[str, str]:
    """Stage name → folder of its finished batch plan, for all stages of the run.

    Raises:
        ConfigError: settings that contradict each other or the columns of a file.
        DataError: a source is missing, empty or has too many bad rows; a stage cannot be planned.
    """
    _check(run)
    teaching = teaching or Teaching()
    used = {name for stage in run.stages for name in stage.datasets}
    datasets = {
        dataset.name: with_source_path(dataset, run.data.root)
        for dataset in run.data.datasets
        if dataset.name in used
    }
    # What can be wrong is found before what takes long: all files, then all rows, then mining.
    pieces = {name: _pieces(dataset) for name, dataset in datasets.items()}
    held_out = _held_out(run)
    records = {
        name: _records(run, dataset, pieces[name], held_out, storage, execute)
        for name, dataset in datasets.items()
    }
    prepared = {
        name: _mined(dataset, records[name], storage, execute, teaching)
        for name, dataset in datasets.items()
    }
    plans = {}
    for stage in run.stages:
        config = PlanConfig(
            weights=stage.datasets,
            global_pairs=stage.batch.global_pairs,
            num_negatives=stage.batch.num_negatives,
            num_steps=stage.steps,
            seed=run.seed,
            in_batch_negatives=stage.batch.in_batch_negatives,
            key=stage.name,
            policy=stage.batch.policy,
        )
        inputs = {name: prepared[name].fingerprint for name in stage.datasets}
        named = fingerprint({**vars(config), "inputs": inputs, "version": CODE_VERSION})
        folder = join(storage, "plans", f"{stage.name}-{named}")
        parts = {name: prepared[name].parts for name in stage.datasets}
        plan = write_plan(folder, parts, config, inputs=inputs, execute=execute)
        write_audit(plan, {name: prepared[name].manifest for name in stage.datasets}, parts)
        plans[stage.name] = folder
    return plans


def _check(run: Run) -> None:
    """Return when no stage asks for more negatives than its data sets mine."""
    by_name = {dataset.name: dataset for dataset in run.data.datasets}
    for stage in run.stages:
        for name in stage.datasets:
            mining = by_name[name].mining
            if mining is not None and stage.batch.num_negatives > mining.num_negatives:
                raise ConfigError(
                    f"stage {stage.name!r} takes batch.num_negatives {stage.batch.num_negatives} "
                    f"of each query, but data set {name!r} mines {mining.num_negatives}; raise its "
                    "mining.num_negatives or lower the stage's"
                )


def _held_out(run: Run) -> HeldOut:
    """What the evaluation keeps to itself, of all Wikipedia files of the run.

    Also of those that no stage uses: the evaluation takes the first one that is configured.
    """
    datasets = [with_source_path(dataset, run.data.root) for dataset in run.data.datasets]
    paths = {d.source.path: None for d in datasets if isinstance(d.source, WikipediaSource)}
    if run.evaluation.suite == "wikipedia" and run.evaluation.source is not None:
        root, path = run.data.root, run.evaluation.source
        relative = root and "://" not in path and not Path(path).is_absolute()
        paths[join(root, path) if relative else path] = None
    sources = (read_articles(resolve(path)) for path in paths)
    return hold_out(sources, run.data.held_out.num_titles, run.seed)


def _pieces(dataset: DatasetConfig) -> list[Piece]:
    """The pieces of a source of pairs, whose columns were found; none of another source."""
    if not isinstance(dataset.source, PairsSource):
        return []
    pieces = list_pieces(dataset.source.path)
    check_columns(pieces[0], dataset.source)
    return pieces


def _records(
    run: Run,
    dataset: DatasetConfig,
    pieces: Sequence[Piece],
    held_out: HeldOut,
    storage: str,
    execute: Execute,
) -> Prepared:
    """The records of a source: converted, decontaminated, without duplicates, sampled."""
    began = time.monotonic()
    source = dataset.source
    if isinstance(source, PairsSource):
        content = fingerprint([[p.path.rsplit("/", 1)[-1], p.start, p.version] for p in pieces])
    else:
        content = hashlib.sha256(resolve(source.path).read_bytes()).hexdigest()[:12]
    num_negatives = max(
        stage.batch.num_negatives for stage in run.stages if dataset.name in stage.datasets
    )
    inputs = {
        "code": CODE_VERSION,
        "settings": dataset.model_dump(mode="json", exclude={"mining": True, "source": {"path"}}),
        "source": content,
        "held_out": fingerprint(sorted(map(str, (*held_out.titles, *held_out.texts)))),
        "seed": run.seed,
        "num_negatives": num_negatives,
    }
    folder = _folder(storage, "records", dataset, inputs)
    if (found := _finished(folder)) is not None:
        return found
    what = f"records {dataset.name}"
    target = join(folder, "parts")
    results: list[Result]
    if isinstance(source, WikipediaSource):
        count = len(read_articles(resolve(source.path)))
        ranges = [
            ArticleRange(first, min(first + ROWS_PER_PART, count))
            for first in range(0, count, ROWS_PER_PART)
        ]
        task = ConvertArticles(target, source.path, dataset, run.seed, num_negatives, held_out)
        results = run_units(folder, what, task, ranges, execute)
    else:
        units = [PieceUnit(piece) for piece in pieces]
        results = run_units(folder, what, ConvertPairs(target, dataset, held_out), units, execute)
    _accept(dataset, results)
    names, rejected = _selected(run, dataset, folder, target, results, execute)
    manifest = _manifest(inputs, results, names, rejected, began)
    return _finish(folder, manifest)


def _accept(dataset: DatasetConfig, results: Sequence[Result]) -> None:
    """Return when the rows are enough and not too many are bad."""
    rows_in, rows_out, rejected = add_up(results)
    path = dataset.source.path
    examples = [example for result in results for example in result["examples"]]
    shown = "".join(f"\n  {e['reason']}: {e['row']}" for e in examples[:_EXAMPLES_SHOWN])
    counts = ", ".join(f"{count} × {reason}" for reason, count in rejected.items())
    if rows_out == 0:
        raise DataError(
            f"data set {dataset.name!r} is empty: {path!r} has {rows_in} rows, none usable "
            f"({counts or 'no rows at all'}){shown}"
        )
    # What is held out is good data kept back, not bad data.
    bad = sum(count for reason, count in rejected.items() if reason != HELD_OUT_TEXT)
    source = dataset.source
    if isinstance(source, PairsSource) and bad > source.max_rejected_share * rows_in:
        raise DataError(
            f"data set {dataset.name!r}: {bad} of {rows_in} rows of {path!r} were rejected "
            f"({counts}), more than source.max_rejected_share {source.max_rejected_share}; mend "
            f"them or raise the share. For instance:{shown}"
        )
    log.info("records %s: %d of %d rows (%s)", dataset.name, rows_out, rows_in, counts)


def _selected(
    run: Run,
    dataset: DatasetConfig,
    folder: str,
    target: str,
    results: Sequence[Result],
    execute: Execute,
) -> tuple[list[list[Any]], dict[str, int]]:
    """Names and rows of the parts after duplicates are dropped and samples drawn."""
    names = [item for result in results for item in result["parts"]]
    parts = [Part(join(target, name), rows) for name, rows in names]
    keep, rejected = select(read_index(parts).id_hash, dataset.num_samples, run.seed)
    if not rejected:
        if dataset.num_samples is not None and len(keep) < dataset.num_samples:
            log.warning(
                "data set %s: num_samples is %d, but there are only %d rows; all are taken",
                *(dataset.name, dataset.num_samples, len(keep)),
            )
        return names, {}
    edges = np.cumsum([part.rows for part in parts])[:-1]
    kept = [np.flatnonzero(mask) for mask in np.split(keep, edges)]
    units = [RowsOfPart(part, rows) for part, rows in zip(parts, kept, strict=True) if len(rows)]
    done = run_units(folder, f"select {dataset.name}", KeepRows(target), units, execute)
    return [item for result in done for item in result["parts"]], rejected


def _mined(
    dataset: DatasetConfig, records: Prepared, storage: str, execute: Execute, teaching: Teaching
) -> Prepared:
    """The records with hard negatives, or as they are where none are mined."""
    config = dataset.mining
    if config is None:
        return records
    began = time.monotonic()
    weights = teaching.fingerprint(config.teacher)
    settings = embedding_settings(config, weights)
    inputs = {
        "code": CODE_VERSION,
        "settings": config.model_dump(mode="json", exclude={"teacher"}),
        "teacher": weights,
        "vectors": settings,
        "records": records.fingerprint,
    }
    folder = _folder(storage, "mined", dataset, inputs)
    if (found := _finished(folder)) is not None:
        return found
    vectors = join(storage, "data", "vectors", settings)
    units = [PartUnit(part) for part in records.parts]
    embed = EmbedPart(vectors, config, teaching.load)
    run_units(folder, f"embed {dataset.name}", embed, units, execute, "gpu or machine")
    target = join(folder, "parts")
    task = MinePart(target, vectors, tuple(records.parts), config, weights)
    results = run_units(folder, f"mine {dataset.name}", task, units, execute, "gpu or cpu")
    names = [item for result in results for item in result["parts"]]
    manifest = _manifest(inputs, results, names, {}, began)
    manifest["mined"] = sum(result["mined"] for result in results)
    manifest["without_negatives"] = sum(result["without"] for result in results)
    return _finish(folder, manifest)


def _folder(storage: str, kind: str, dataset: DatasetConfig, inputs: Mapping[str, Any]) -> str:
    return join(storage, "data", kind, f"{dataset.name}-{fingerprint(dict(inputs))}")


def _manifest(
    inputs: Mapping[str, Any],
    results: Sequence[Result],
    names: list[list[Any]],
    rejected: Mapping[str, int],
    began: float,
) -> dict[str, Any]:
    """What a finished folder says of itself; rows in are rows out plus rejected ones."""
    rows_in, _, reasons = add_up(results)
    reasons |= rejected
    rows_out = sum(rows for _, rows in names)
    assert rows_in == rows_out + sum(reasons.values()), (rows_in, rows_out, reasons)
    return {
        "fingerprint": fingerprint(dict(inputs)),
        "inputs": dict(inputs),
        "rows_in": rows_in,
        "rows_out": rows_out,
        "rejected": reasons,
        "examples": [e for result in results for e in result.get("examples", [])][:20],
        "parts": names,
        "seconds": round(time.monotonic() - began, 3),
    }


def _finish(folder: str, manifest: Mapping[str, Any]) -> Prepared:
    content = json.dumps(manifest, indent=1, ensure_ascii=False).encode()
    write_atomic(join(folder, "manifest.json"), content)
    return Prepared(folder, manifest)


def _finished(folder: str) -> Prepared | None:
    path = join(folder, "manifest.json")
    if not exists(path):
        return None
    log.info("%s is there", folder)
    return Prepared(folder, json.loads(read_bytes(path)))
