"""Make the held-out part of a data set: its rows, the texts to exclude from training, and an
evaluation set (in BEIR's layout, or graded pairs).

    storage/data/held_out/<data set>-<fingerprint>/parts/           its rows, as records
                                                   texts.npz        hashes of its texts
                                                   beir/corpus.jsonl, queries.jsonl, qrels/test.tsv
                                                   graded.jsonl     in place of beir/
                                                   manifest.json, audit.html

The corpus has the distinct held-out documents, and every pair of a query and one of them that any
row names is a judgement, so that the judgements are as complete as the data. Training rows are
free of the queries and positives of held-out rows. The negatives of these may be trained on: they
are not in the retrieval set, and banning them would cost many times the held-out rows.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.names import check_inside
from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.document import fingerprint
from rayembed.config.held_out import HeldOut, HeldOutGroups, HeldOutIds
from rayembed.config.sources import Source
from rayembed.data.engine.artifacts import (
    ArtifactWriter,
    DatasetArtifact,
    PipelineContext,
    open_artifact,
)
from rayembed.data.engine.parts import Part, read_records, remedy
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.hashes import seeded_keys, text_hash
from rayembed.data.held_out.choice import choose, listed_values
from rayembed.data.records import Record
from rayembed.data.sources.convert import converted_rows, make_converted, rejected_before
from rayembed.data.sources.file_rows import ResolvedDataset
from rayembed.data.sources.tasks import ConvertedRows, HeldOutRows, RecordWriter
from rayembed.data.words import normalised_hash, same_text_form
from rayembed.errors import ArtifactError, ConfigError

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Code version of held-out parts; raise it when the same inputs yield others."""

KEPT = "kept for training"
SET = "beir"
"""Folder of the retrieval set below the part's."""
GRADED = "graded.jsonl"
"""File of graded pairs below the part's folder."""
TEXTS = "texts.npz"
_DIGESTS = "digests"


@dataclass(frozen=True)
class HeldOutPart:
    """A finished held-out part of a data set, with the hashes that identify its rows and texts."""

    artifact: DatasetArtifact
    rows: HeldOutRows
    texts: frozenset[int]
    """`normalised_hash` of the texts that no training row may have."""


def make_part(context: PipelineContext, checked: ResolvedDataset) -> HeldOutPart | None:
    """Make or reuse the held-out part of a data set; returns None if the data set holds nothing
    out.

    Records of an earlier job that held a part out hand on that part, and hold out no further one.

    Raises:
        DataError: too few documents would be held out, or the file of ids cannot be read.
        ConfigError: records that have a held-out part shall hold out groups or ids.
        ArtifactError: their part compares texts in another form.
    """
    dataset = checked.dataset
    held_out, source = dataset.held_out, dataset.source
    if (folder := source.held_out_folder()) is not None:
        _check_is_handed_on(dataset.name, source, held_out)
        return _opened(_checked_version(open_artifact(folder), source))
    if held_out is None:
        return None
    values = listed_values(held_out, context.root)
    if isinstance(held_out, HeldOutIds):  # what was read is what is held out, whatever comes later
        named = held_out.model_copy(update={"values": tuple(values), "file": None})
        dataset = dataset.model_copy(update={"held_out": named})
        checked = replace(checked, dataset=dataset)
    writer = ArtifactWriter(
        context.storage,
        "held_out",
        dataset.name,
        {
            "code": CODE_VERSION,
            "held_out": held_out.model_dump(mode="json", exclude={"values", "file"}),
            "values": fingerprint(sorted(values)),
            "source": checked.content,
            "settings": dataset.model_dump(
                mode="json",
                include={"source", "task", "query_instruction", "document_instruction"},
                exclude={"source": {*source.paths, "max_rejected_share"}},
            ),
        },
    )
    return _opened(writer.get_or_make(lambda: _made(context, checked, writer)))


@dataclass(frozen=True)
class CollectRows:
    """Task: write the held-out rows of one piece of the source; of a row that gives several
    records, only the first is written.
    """

    folder: str
    chosen: HeldOutRows

    def __call__(self, item: ConvertedRows) -> Result:
        """Write the held-out rows; return `parts` and counts, in which rows kept for training count
        as rejected.
        """
        writer = RecordWriter(self.folder)
        for records in item.rows():
            if self.chosen.has(records[0]):
                writer.take(records[:1], records[0].query)
            else:
                writer.rejected[KEPT] = writer.rejected.get(KEPT, 0) + 1
        return writer.finish()


def _made(
    context: PipelineContext, checked: ResolvedDataset, writer: ArtifactWriter
) -> DatasetArtifact:
    dataset, converted = checked.dataset, make_converted(context, checked)
    items = converted_rows(converted)
    rows = choose(context, dataset, items)
    task = CollectRows(writer.parts_folder, rows)
    what = f"held-out rows of {dataset.name}"
    collected = run_resumable(writer.folder, what, task, items, context.execute)
    results = [rejected_before(converted), *collected]
    made = [part for result in results for part in result["parts"]]
    parts = [Part(join(writer.parts_folder, name), count) for name, count in made]
    queries, texts = set[int](), set[int]()
    for record in _records(parts):
        queries.add(normalised_hash(record.query))
        texts.update(map(normalised_hash, (record.query, *record.positives)))
    save_arrays(
        join(writer.folder, TEXTS),
        documents=_array(rows.documents),
        queries=_array(queries),
        texts=_array(texts),
    )
    assert dataset.held_out is not None
    if dataset.source.is_graded:
        counts, digests = write_graded_set(writer.folder, parts, dataset.held_out)
    else:
        counts, digests = write_retrieval_set(
            writer.folder, parts, rows.documents, dataset.held_out
        )
    log.info(
        "data set %s: %d of %d rows are held out; their evaluation set has %s",
        *(dataset.name, sum(part.rows for part in parts), sum(r["rows_in"] for r in results)),
        ", ".join(f"{number} {what}" for what, number in counts.items()),
    )
    more = {"converted": converted.fingerprint, _DIGESTS: digests}
    return writer.finish(results, made, None, **counts, **more)


def check_set(part: DatasetArtifact) -> None:
    """Check that the evaluation files of a held-out part are unchanged since they were written.

    Raises:
        ArtifactError: one is missing or changed; the message names it.
        StorageError: the storage does not give it.
    """
    for name, digest in part.manifest[_DIGESTS].items():
        path = join(part.folder, check_inside(name, f"the manifest of {part.folder!r}"))
        if not exists(path):
            raise ArtifactError(f"the file {path!r} is missing. {remedy(path)}")
        if xxhash.xxh3_128_hexdigest(read_bytes(path)) != digest:
            raise ArtifactError(
                f"the file {path!r} was changed after it was written: its checksum differs. "
                f"{remedy(path)}"
            )


def write_retrieval_set(
    folder: str, parts: Sequence[Part], documents: frozenset[int], held_out: HeldOut
) -> tuple[dict[str, int], dict[str, str]]:
    """Write the retrieval set of held-out rows; return its numbers of queries, documents and
    judgements, and the digest of each file.

    Ids are hashes of texts and everything is sorted by them, so that equal rows give equal files.
    Texts that differ only in case, width and white space are one: the first in code point order.
    Queries and documents stand in memory: as many as `max_queries`, or the rows of chosen groups.

    Args:
        documents: hashes of those that make up the corpus.
    """
    hashes = _array({normalised_hash(record.query) for record in _records(parts)})
    keys = seeded_keys(hashes, held_out.seed, "held-out queries")
    chosen = set(hashes[np.argsort(keys)][: held_out.max_queries].tolist())
    corpus, queries, judged = dict[str, str](), dict[str, str](), set[tuple[str, str]]()
    for record in _records(parts):
        is_chosen = normalised_hash(record.query) in chosen
        for document in record.positives:
            if normalised_hash(document) not in documents:
                continue
            judgement = _id(record.query), _add(corpus, document)
            if is_chosen:
                _add(queries, record.query)
                judged.add(judgement)
    lines = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t1" for q, d in sorted(judged))]
    digests = {
        **_write_lines(folder, f"{SET}/corpus.jsonl", _jsonl(corpus)),
        **_write_lines(folder, f"{SET}/queries.jsonl", _jsonl(queries)),
        **_write_lines(folder, f"{SET}/qrels/test.tsv", lines),
    }
    counts = {"queries": len(queries), "documents": len(corpus), "judgements": len(judged)}
    return counts, digests


def write_graded_set(
    folder: str, parts: Sequence[Part], held_out: HeldOut
) -> tuple[dict[str, int], dict[str, str]]:
    """Write at most `max_queries` held-out graded pairs, each once; return their number and the
    digest of the file.
    """
    scores, texts = dict[tuple[str, str], list[float]](), dict[str, str]()
    for one in _records(parts):
        assert one.similarity is not None
        ids = _add(texts, one.query), _add(texts, one.positives[0])
        scores.setdefault(ids, []).append(one.similarity)
    # A pair with several scores has their mean, whatever the order of its rows.
    pairs = {
        (texts[first], texts[second]): math.fsum(given) / len(given)
        for (first, second), given in scores.items()
    }
    hashes = {text_hash("\n".join(pair)): pair for pair in pairs}
    order = _array(set(hashes))
    keys = seeded_keys(order, held_out.seed, "held-out queries")
    chosen = sorted(hashes[number] for number in order[np.argsort(keys)][: held_out.max_queries])
    rows = [{"sentence1": a, "sentence2": b, "score": pairs[a, b]} for a, b in chosen]
    digests = _write_lines(folder, GRADED, [json.dumps(row, ensure_ascii=False) for row in rows])
    return {"pairs": len(rows)}, digests


def _check_is_handed_on(name: str, source: Source, held_out: HeldOut | None) -> None:
    if isinstance(held_out, HeldOutGroups | HeldOutIds):
        setting = f"data.datasets.{name}.held_out"
        raise ConfigError(
            f"{setting}.kind {held_out.kind!r}: the records at {source.place!r} already have a "
            f"held-out part, so another one cannot be chosen; set {setting}.kind=fraction to "
            f"score the existing part, or {setting}=null to score none"
        )


def _checked_version(part: DatasetArtifact, source: Source) -> DatasetArtifact:
    """Return the held-out part if it was made with this program's version of the text hashes;
    otherwise raise, since other hashes would exclude no text.
    """
    if (code := part.manifest["inputs"].get("code")) != CODE_VERSION:
        raise ArtifactError(
            f"the held-out part {part.folder!r} of the records at {source.place!r} identifies "
            f"texts by version {code} of rayembed's text hashes, but this program uses version "
            f"{CODE_VERSION}: prepare these records again, with a new storage_path or after "
            f"removing their folder {source.place!r}"
        )
    return part


def _opened(artifact: DatasetArtifact) -> HeldOutPart:
    check_set(artifact)
    path = join(artifact.folder, TEXTS)
    found = load_arrays(path, remedy(path))
    hashes = {name: frozenset[int](array.tolist()) for name, array in found.items()}
    return HeldOutPart(
        artifact, HeldOutRows(hashes["documents"], hashes["queries"]), hashes["texts"]
    )


def _records(parts: Sequence[Part]) -> Iterator[Record]:
    for part in parts:
        yield from read_records(part.path)


def _array(hashes: set[int] | frozenset[int]) -> np.ndarray:
    return np.sort(np.fromiter(hashes, np.int64, len(hashes)))


def _id(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(same_text_form(text).encode())


def _add(texts: dict[str, str], text: str) -> str:
    """Add a text under its id, and return the id; of several spellings of a text the first in code
    point order stays.
    """
    name, spelled = _id(text), text.strip()
    texts[name] = min(texts.get(name, spelled), spelled)
    return name


def _jsonl(texts: dict[str, str]) -> list[str]:
    rows: list[dict[str, Any]] = [{"_id": name, "text": texts[name]} for name in sorted(texts)]
    return [json.dumps(row, ensure_ascii=False) for row in rows]


def _write_lines(folder: str, name: str, lines: Sequence[str]) -> dict[str, str]:
    """Write lines as a file below a folder; return its name and the digest of the written bytes."""
    content = "".join(f"{line}\n" for line in lines).encode()
    write_atomic(join(folder, name), content)
    return {name: xxhash.xxh3_128_hexdigest(content)}
