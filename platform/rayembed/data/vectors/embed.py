"""Embed the texts of parts with a teacher, into files of vectors that all runs share.

Vectors are stored as float16 in files named by the teacher's settings, `VECTORS` and the part's
content, so that later runs reuse them. Each file is read whole and ends with a checksum.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from rayembed.assets.array_files import REMEDY, load_array, load_arrays, save_array, save_arrays
from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.local_copies import read_copied
from rayembed.assets.storage import exists, file_name, join, list_files
from rayembed.config.mining import Teacher
from rayembed.config.types import Role
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import Part, PartItem, read_records, read_table, remedy
from rayembed.data.engine.work_items import Result, run_tasks
from rayembed.data.hashes import NO_HASH, label_hash, text_hash
from rayembed.data.records import Record
from rayembed.data.vectors.teacher import Encoder, embedding_settings, load_teacher
from rayembed.display.progress import pieces
from rayembed.errors import ArtifactError, DataError
from rayembed.models.versions import versions, warn_of_other_versions

log = logging.getLogger(__name__)

_LAST = "index.npz"
"""File written last, which marks a part's vectors as complete."""

TEXTS = ".texts.npy"

_GIVEN = "given"
"""File with vectors of a part's own negatives, next to the hashes of their texts."""

Texts = Literal["rows", "documents", "given"]
"""Texts of a part that are embedded: queries and positives of rows, the documents of a corpus, or
the negatives that rows bring."""

_FILES = ("queries.npy", "documents.npy", _LAST)
_FILES_OF: Mapping[Texts, tuple[str, ...]] = {
    "rows": _FILES,
    "documents": _FILES,
    "given": (f"{_GIVEN}{TEXTS}", f"{_GIVEN}.npy"),
}


@dataclass(frozen=True)
class PartTexts:
    """Index of the texts of a Parquet part with n rows and M distinct positives."""

    text_hash: np.ndarray
    """(M,) int64 hash of the distinct positives, in the order of their vectors."""
    first: np.ndarray
    """(n + 1,) int64: row i has the positives `place[first[i]:first[i + 1]]`."""
    place: np.ndarray
    """int64 indices into `text_hash`, a row's positives in their order."""
    label_of: np.ndarray
    """(L,) int64 hashes of texts that have a class."""
    label_hash: np.ndarray
    """(L,) int64 hashes of these classes."""


class VectorFile(NamedTuple):
    """A file of vectors, with a function that reads the hashes of their texts."""

    path: str
    hashes: Callable[[], np.ndarray]
    """Function that reads the (rows,) int64 hashes of the texts."""


@dataclass(frozen=True)
class Vectors:
    """Files with the vectors that one teacher computed with one set of settings."""

    folder: str
    weights: str
    """Fingerprint of the teacher's weights."""

    def texts(self, part: Part) -> PartTexts:
        """Load the index of the texts of a Parquet part; raises the same errors as `queries`."""
        loaded = read_copied(self.path(part, _LAST), load_arrays)
        return PartTexts(**{name: loaded[name] for name in PartTexts.__dataclass_fields__})

    def queries(self, part: Part) -> np.ndarray:
        """Load the (n, D) float16 unit vectors of the queries, one for each row.

        Raises:
            ArtifactError: the file is missing, is not what was written, or holds NaN or infinity.
        """
        return _load(self.path(part, "queries.npy"))

    def documents(self, part: Part) -> np.ndarray:
        """Load the (M, D) float16 unit vectors of the distinct positives; raises the same errors as
        `queries`.
        """
        return read_copied(self.path(part, "documents.npy"), _load)

    def has(self, part: Part, of: Texts = "rows") -> bool:
        """Whether all vector files exist for the Parquet part's texts of the kind `of`."""
        return all(exists(self.path(part, name)) for name in _FILES_OF[of])

    def missing(self, parts: Sequence[Part], of: Texts = "rows") -> list[PartItem]:
        """List the Parquet parts that lack a vector file for their texts of the kind `of`."""
        there = set(list_files(self.folder, recursive=False))
        return [
            PartItem(part)
            for part in parts
            if not all(f"{part.digest}.{name}" in there for name in _FILES_OF[of])
        ]

    def save(
        self, part: Part, queries: np.ndarray, documents: np.ndarray, texts: PartTexts
    ) -> None:
        """Write the vectors of a Parquet part's queries and documents, and the index of its
        texts.
        """
        save_array(self.path(part, "queries.npy"), queries.astype(np.float16))
        save_array(self.path(part, "documents.npy"), documents.astype(np.float16))
        save_arrays(self.path(part, _LAST), **vars(texts))

    def given(self, part: Part) -> np.ndarray:
        """(G, D) float16 unit vectors of the distinct hard negatives that come with the
        rows.

        Raises as `queries`.
        """
        return _load(self.path(part, f"{_GIVEN}.npy"))

    def file(self, name: str) -> VectorFile:
        """Locate the vectors and hashes that `save_file` wrote under a name."""
        path, texts = self.paths(name)
        return VectorFile(path, partial(load_array, texts))

    def paths(self, name: str) -> tuple[str, str]:
        """Paths of the vectors and of the hashes that `save_file` writes."""
        return join(self.folder, f"{name}.npy"), join(self.folder, f"{name}{TEXTS}")

    def save_file(self, name: str, vectors: np.ndarray, hashes: np.ndarray) -> None:
        """Write the texts' vectors and their (rows,) int64 hashes; the file of hashes is written
        first.
        """
        path, texts = self.paths(name)
        save_array(texts, hashes)
        save_array(path, vectors)

    def path(self, part: Part, name: str) -> str:
        """Path of one of the part's files, such as `queries.npy`."""
        return join(self.folder, f"{part.digest}.{name}")


@dataclass(frozen=True)
class EmbedPart:
    """Task: embed the distinct texts of a Parquet part, unless their vectors exist."""

    vectors: Vectors
    config: Teacher
    load: Callable[[Teacher, str, str], Encoder] = load_teacher
    of: Texts = "rows"

    def __call__(self, item: PartItem, device: str = "cpu") -> Result:
        """Embed the texts of a Parquet part if their vectors do not exist yet; return its row
        counts.
        """
        rows = item.part.rows
        if not self.vectors.has(item.part, self.of):
            self._embed(item.part, device)
        return {"rows_in": rows, "rows_out": rows, "rejected": {}}

    def _embed(self, part: Part, device: str) -> None:
        asked: list[tuple[list[str], Role]] = []
        if self.of == "documents":
            texts = read_table(part.path)["text"].to_pylist()
            known = known_of(texts)
        elif self.of == "given":
            texts = given_texts(read_records(part.path))
        else:
            records = read_records(part.path)
            texts, known = texts_of(records)
            asked = [([record.query for record in records], "query")]
        asked.append((texts, "document"))
        encoder = self.load(self.config, self.vectors.weights, device)
        found = [finite(self.config, some, encoder(some, role)) for some, role in pieces(asked)]
        if self.of == "given":
            hashes = np.array([text_hash(text) for text in texts], dtype=np.int64)
            self.vectors.save_file(f"{part.digest}.{_GIVEN}", found[-1].astype(np.float16), hashes)
        else:
            queries = found[0] if self.of == "rows" else found[0][:0]
            self.vectors.save(part, queries, found[-1], known)


def embed_parts(
    context: PipelineContext, dataset: str, parts: Sequence[Part], teacher: Teacher
) -> Vectors:
    """Return the vectors of all Parquet parts; vectors that do not exist yet are computed on the
    cluster.

    Args:
        dataset: names the task in the log.
    """
    teacher = context.teacher_loader.settled(teacher)
    vectors = vectors_of(context, teacher)
    task = EmbedPart(vectors, teacher, context.teacher_loader.load)
    # No results are kept: the files themselves tell what is done, whoever removes some.
    missing = vectors.missing(parts)
    _record_versions(vectors)
    name = f"embed {dataset} {file_name(vectors.folder)}"
    run_tasks(name, task, missing, context.execute, "gpu or machine")
    _warn_if_collapsed(dataset, teacher, vectors, parts)
    return vectors


_FEWEST_DOCUMENTS = 10
_SAME = 1e-3
"""Largest difference between vectors that count as equal, relative to their largest component: that
of float16."""


def _warn_if_collapsed(
    dataset: str, teacher: Teacher, vectors: Vectors, parts: Sequence[Part]
) -> None:
    """Warn if a teacher gives the same vector to all documents of a Parquet part."""
    for part in parts:
        documents = vectors.documents(part).astype(np.float32)
        if len(documents) < _FEWEST_DOCUMENTS or documents.shape[1] == 1:
            continue  # unit vectors of one component are equal anyway
        if np.abs(documents - documents[0]).max() <= _SAME * np.abs(documents).max():
            log.warning(
                "data set %s: the teacher %r gives the same vector for all of %d different "
                "documents, so it cannot distinguish them: a consistency filter would let every "
                "row pass, and hard negatives would be arbitrary documents. Choose another teacher",
                *(dataset, teacher.teacher, len(documents)),
            )
        return


def vectors_of(context: PipelineContext, teacher: Teacher) -> Vectors:
    """Locate the vector files of a teacher whose number type is fixed; they may not exist yet."""
    weights = context.teacher_loader.fingerprint(teacher.teacher)
    folder = join(context.storage, "data", "vectors", embedding_settings(teacher, weights))
    return Vectors(folder, weights)


def _record_versions(vectors: Vectors) -> None:
    """Record the library versions of the first embedding, and warn if later ones use other
    versions.
    """
    record = join(vectors.folder, "versions.json")
    if exists(record):
        recorded = read_json(record, remedy(record))["versions"]
        warn_of_other_versions(f"vectors in {vectors.folder!r}", recorded)
    else:
        write_json(record, {"versions": versions()})


def finite(config: Teacher, texts: Sequence[str], vectors: np.ndarray) -> np.ndarray:
    """Return the vectors, but raise if one has NaN or infinity, which would pass every rule
    unnoticed.

    Raises:
        DataError: one has a number that is not finite.
    """
    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(bad):
        raise DataError(
            f"the teacher {config.teacher!r} (setting teacher) gives vectors with NaN or infinity "
            f"for {len(bad)} of {len(texts)} texts, the first: {texts[bad[0]][:200]!r}. Its "
            "weights are broken or overflow; choose another teacher"
        )
    return vectors


def texts_of(records: Sequence[Record]) -> tuple[list[str], PartTexts]:
    """Collect the records' M distinct positives in order of first occurrence, and index them."""
    places: dict[str, int] = {}
    classes: dict[tuple[int, int], None] = {}
    place: list[int] = []
    first = [0]
    for record in records:
        label = label_hash(record.label)
        for text in record.positives:
            place.append(places.setdefault(text, len(places)))
            if label != NO_HASH:
                classes[text_hash(text), label] = None
        first.append(len(place))
    pairs = np.array(list(classes), dtype=np.int64).reshape(-1, 2)
    known = PartTexts(
        text_hash=np.array([text_hash(text) for text in places], dtype=np.int64),
        first=np.array(first, dtype=np.int64),
        place=np.array(place, dtype=np.int64),
        label_of=pairs[:, 0],
        label_hash=pairs[:, 1],
    )
    return list(places), known


def known_of(texts: Sequence[str]) -> PartTexts:
    """Make the index of a Parquet part that has documents only, without rows or classes."""
    hashes = np.array([text_hash(text) for text in texts], dtype=np.int64)
    return replace(texts_of([])[1], text_hash=hashes)


def given_texts(records: Sequence[Record]) -> list[str]:
    """Distinct negatives of the records, in order of first occurrence."""
    return list(dict.fromkeys(n.text for record in records for n in record.negatives))


def _load(path: str) -> np.ndarray:
    vectors = load_array(path)
    bad = int((~np.isfinite(vectors).all(1)).sum())
    if bad:
        raise ArtifactError(
            f"the file of vectors {path!r} has NaN or infinity in {bad:,} of {len(vectors):,} "
            f"vectors, which would pass every filter and mining rule unnoticed. {REMEDY}"
        )
    return vectors
