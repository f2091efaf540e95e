"""Collect a teacher's vectors of all texts of a stage before training, for the workers to
look up.

    storage/data/teacher_vectors/<stage>-<fingerprint>/query.*.npy, document.*.npy   `TextIndex`
                                                       manifest.json
    storage/data/vectors/<teacher's settings>/         the vectors

Most vectors are those that `embed` made: of queries and positives of one of a data set's folders,
whichever has the most already. So a stage whose teacher has mined or clustered the data costs
nothing more. What is left are negatives: those from a separate corpus, or that rows brought along,
are copied where mining embedded them, and the rest is embedded; their files stand beside the
others, named by the part and the texts, and serve other stages too.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

from rayembed.assets.array_files import load_array
from rayembed.assets.storage import (
    exists,
    file_name,
    file_sizes,
    join,
    list_files,
    remove_file,
)
from rayembed.assets.store import MANIFEST
from rayembed.config.mining import Teacher
from rayembed.config.types import Role
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part, PartItem, read_records
from rayembed.data.engine.work_items import Result, run_tasks
from rayembed.data.hashes import text_hash
from rayembed.data.records import Record
from rayembed.data.vectors.embed import (
    TEXTS,
    VectorFile,
    Vectors,
    embed_parts,
    finite,
    vectors_of,
)
from rayembed.data.vectors.lookup import CODE_VERSION, KIND, ROLES, TextIndex
from rayembed.data.vectors.teacher import Encoder
from rayembed.models.versions import VECTORS

log = logging.getLogger(__name__)

_READ_AT_ONCE = 32
"""Files of hashes read at a time, as each read of object storage waits for its answer."""

_FURTHER = "further"

_ELSEWHERE = "elsewhere"
"""Name of the index of documents whose vectors can be copied."""

Chains = Mapping[str, Sequence[DatasetArtifact]]
"""Data set → the folders of its steps in order; the stage reads the last one."""


def make_store(
    context: PipelineContext, stage: str, chains: Chains, num_negatives: int, teacher: Teacher
) -> DatasetArtifact:
    """Make or reuse the folder with a teacher's vectors of all texts that a stage reads.

    Args:
        stage: its name.
        num_negatives: of each row that the stage reads.

    Raises:
        DataError: the teacher gives vectors that are not finite.
    """
    inputs = {
        "code": CODE_VERSION,
        "weights": context.teacher_loader.fingerprint(teacher.teacher),
        "vectors": VECTORS,
        "settings": teacher.model_dump(mode="json", exclude={"teacher"}),
        "records": {name: chains[name][-1].fingerprint for name in sorted(chains)},
        "num_negatives": num_negatives,
    }
    writer = ArtifactWriter(context.storage, KIND, stage, inputs)
    if (found := writer.existing()) is not None:
        if _is_whole(context, found):
            return found
        log.info(
            "some vector files that the folder %s lists are missing; computing them again",
            found.folder,
        )
        remove_file(join(found.folder, MANIFEST))
    return writer.get_or_make(lambda: _make(context, writer, chains, num_negatives, teacher))


def _is_whole(context: PipelineContext, store: DatasetArtifact) -> bool:
    """Whether all files of the folder exist with their recorded sizes; damaged ones may have been
    deleted singly.
    """
    own = set(list_files(store.folder, recursive=False))
    if not own.issuperset(name for role in ROLES for name in TextIndex.files(role)):
        return False
    told = dict(file for role in ROLES for file in store.manifest["files"][role])
    data = join(context.storage, "data")
    folders = {path.rpartition("/")[0] for path in told}
    there = {
        f"{folder}/{name}": size
        for folder in folders
        for name, size in file_sizes(join(data, folder), recursive=False).items()
    }
    return all(there.get(path) == size for path, size in told.items())


def _make(
    context: PipelineContext,
    writer: ArtifactWriter,
    chains: Chains,
    num_negatives: int,
    teacher: Teacher,
) -> DatasetArtifact:
    teacher = writer.settled(context, teacher)
    vectors = vectors_of(context, teacher)
    parts = [
        p for name in sorted(chains) for p in _embedded(context, vectors, chains, name, teacher)
    ]
    files: dict[Role, list[VectorFile]] = {
        "query": [_queries(vectors, part) for part in parts],
        "document": [_positives(vectors, part) for part in parts],
    }
    working = writer.working_folder
    for role in ROLES:
        _index(files[role]).save(working, role)
    last = {p.digest: p for folders in chains.values() for p in folders[-1].parts}
    elsewhere = _elsewhere(context, vectors, chains)
    _index(elsewhere).save(working, _ELSEWHERE)
    _loaded.cache_clear()  # of an earlier try
    task = EmbedFurther(
        vectors,
        working,
        tuple(one.path for one in elsewhere),
        teacher,
        num_negatives,
        context.teacher_loader.load,
    )
    # No results are kept: the files themselves tell what is done, whoever removes some.
    items = [PartItem(part) for part in last.values()]
    what = f"further {writer.dataset}"
    results = run_tasks(what, task, items, context.execute, "gpu or machine")
    for role in ROLES:
        names = [result[role] for result in results if result[role]]
        files[role] += [vectors.file(name) for name in names]
    return _finish(writer, teacher, vectors, files, results)


def _finish(
    writer: ArtifactWriter,
    teacher: Teacher,
    vectors: Vectors,
    files: Mapping[Role, Sequence[VectorFile]],
    results: Sequence[Result],
) -> DatasetArtifact:
    """Write the index of all vector files and the folder's manifest."""
    indexes = {role: _index(files[role]) for role in ROLES}
    for role, index in indexes.items():
        index.save(writer.folder, role)
    sizes, below = file_sizes(vectors.folder, recursive=False), file_name(vectors.folder)
    told = {
        role: [
            (f"vectors/{below}/{name}", sizes[name])
            for name in (file_name(one.path) for one in files[role])
        ]
        for role in ROLES
    }
    made = writer.finish_with(
        {
            "parts": [],
            "teacher": teacher.teacher,
            "dtype": teacher.dtype,
            "width": int(load_array(files["query"][0].path).shape[1]),
            "files": told,
            "texts": {role: len(index.text_hash) for role, index in indexes.items()},
            # Not how many were copied: an earlier try, or another stage, may have made the files.
            "further": {role: sum(result["left"][role] for result in results) for role in ROLES},
        }
    )
    copied, embedded = (sum(result[name] for result in results) for name in ("copied", "embedded"))
    log.info(
        "teacher vectors of stage %s by %s: %s queries, %s documents, %d dimensions; vectors of "
        "hard negatives: %s copied from mining, %s embedded",
        *(writer.dataset, teacher.teacher.partition("?")[0]),
        *(f"{made.manifest['texts'][role]:,}" for role in ROLES),
        made.manifest["width"],
        *(f"{count:,}" for count in (copied, embedded)),
    )
    return made


@dataclass(frozen=True)
class EmbedFurther:
    """Task: copy or embed vectors of a part's texts, such as negatives, that are in no vector file
    yet.
    """

    vectors: Vectors
    working: str
    """Scratch folder with the indexes of existing vectors."""
    elsewhere: tuple[str, ...]
    """Files from which vectors of documents are copied."""
    config: Teacher
    num_negatives: int
    load: Callable[[Teacher, str, str], Encoder]

    def __call__(self, item: PartItem, device: str = "cpu") -> Result:
        """Write the part's missing vectors; return row counts, the file of each role (empty if no
        text was `left`), and the numbers `copied` and `embedded`.
        """
        rows, records = item.part.rows, read_records(item.part.path)
        counts, names = {"copied": 0, "embedded": 0}, dict[str, str]()
        num_left: dict[str, int] = {}
        for role in ROLES:
            texts = {text_hash(t): t for r in records for t in _texts(r, role, self.num_negatives)}
            hashes = np.array(list(texts), dtype=np.int64)
            left = hashes[~_loaded(self.working, role).find(hashes)[1]]
            num_left[role] = len(left)
            names[role] = further_name(item.key, role, left) if len(left) else ""
            # Whoever removes files may have left the texts without the vectors, or these alone.
            if not names[role] or all(map(exists, self.vectors.paths(names[role]))):
                continue
            found, there = self._copied(left, role)
            missing = [texts[one] for one in left[~there].tolist()]
            if missing:
                encoder = self.load(self.config, self.vectors.weights, device)
                made = finite(self.config, missing, encoder(missing, role)).astype(np.float16)
                found = made if found is None else found
                found[~there] = made
            assert found is not None
            counts["copied"] += int(there.sum())
            counts["embedded"] += len(missing)
            self.vectors.save_file(names[role], found, left)
        told = {"rows_in": rows, "rows_out": rows, "rejected": {}}
        return {**told, "left": num_left, **counts, **names}

    def _copied(self, hashes: np.ndarray, role: Role) -> tuple[np.ndarray | None, np.ndarray]:
        """Copy vectors of texts from other files; return them (None if there are none) and the (n,)
        bool mask of texts that were found.
        """
        index = _loaded(self.working, _ELSEWHERE)
        places, there = index.find(hashes)
        if role != "document" or not there.any():
            return None, np.zeros(len(hashes), dtype=bool)
        found: np.ndarray | None = None
        wanted = np.flatnonzero(there)
        for number, some, rows in index.by_file(places[there]):
            vectors = load_array(self.elsewhere[number])
            if found is None:
                found = np.empty((len(hashes), vectors.shape[1]), np.float16)
            found[wanted[some]] = vectors[rows]
        return found, there


def _embedded(
    context: PipelineContext, vectors: Vectors, chains: Chains, name: str, teacher: Teacher
) -> list[Part]:
    """Embed a data set's queries and positives, in the Parquet parts of the preparation step that
    lacks the fewest vectors; return these parts.
    """
    costs = [
        sum(item.part.rows for item in vectors.missing(folder.parts)) for folder in chains[name]
    ]
    least = max(place for place, cost in enumerate(costs) if cost == min(costs))
    parts = chains[name][least].parts
    embed_parts(context, name, parts, teacher)
    return parts


def _elsewhere(context: PipelineContext, vectors: Vectors, chains: Chains) -> list[VectorFile]:
    """List other files with vectors of possible negatives, made by mining or for other stages over
    the same parts.
    """
    folders = [folder for folders in chains.values() for folder in folders]
    corpora = [
        ArtifactWriter(context.storage, "documents", "corpus", corpus).existing()
        for folder in folders
        if (corpus := folder.manifest["inputs"].get("corpus")) is not None
    ]
    documents = [part for found in corpora if found is not None for part in found.parts]
    without = {item.key for item in vectors.missing(documents)}
    files = [_positives(vectors, part) for part in documents if part.digest not in without]
    digests = {part.digest for folder in folders for part in folder.parts}
    there = set(list_files(vectors.folder, recursive=False))
    for name in (name.removesuffix(TEXTS) for name in sorted(there) if name.endswith(TEXTS)):
        part, _, kind = name.partition(".")
        if part in digests and f"{_FURTHER}-query" not in kind and f"{name}.npy" in there:
            files.append(vectors.file(name))
    return files


def further_name(part: str, role: Role, hashes: np.ndarray) -> str:
    """Name of the file with vectors of texts that the Parquet part's own vector files lack."""
    return f"{part}.{_FURTHER}-{role}-{xxhash.xxh3_64_hexdigest(hashes.tobytes())}"


def _queries(vectors: Vectors, part: Part) -> VectorFile:
    return VectorFile(vectors.path(part, "queries.npy"), lambda: read_column([part], "query_hash"))


def _positives(vectors: Vectors, part: Part) -> VectorFile:
    return VectorFile(vectors.path(part, "documents.npy"), lambda: vectors.texts(part).text_hash)


def _texts(record: Record, role: Role, num_negatives: int) -> list[str]:
    """Texts of a record that a training step reads as query or as documents."""
    if role == "query":
        return [record.query]
    return [*record.positives, *(one.text for one in record.negatives[:num_negatives])]


def _index(files: Sequence[VectorFile]) -> TextIndex:
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return TextIndex.of(enumerate(pool.map(lambda one: one.hashes(), files)))


@lru_cache(maxsize=3)
def _loaded(folder: str, name: str) -> TextIndex:
    """Load an index of existing vectors, once for each process."""
    return TextIndex.load(folder, name)
