"""Store one model's search results in AIR-Bench's own layout, with a record of the model
and data.

    <folder>/<version>/<retriever>/NoReranker/<task>/<domain>/<language>_<data set>_<split>.json
    <folder>/<version>/<retriever>/made_by.json
    <folder>/<version>/<retriever>/<task>_<domain>_<language>_<data set>_<split>.json
    <folder>/<version>/<retriever>/dev.csv

The first are AIR-Bench's files, with its fields and no others, so its own tools read
`<folder>/<version>`; they pass over files in a retriever's folder. `made_by.json` names the model
and its revision. Then records: where a result comes from, what proves that it is whole, and the
scores of dev splits, of which `dev.csv` is the table (`scores.py`). A result without its record
counts as not made.

All of it may lie in object storage (`assets/storage.py`).
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version as version_of

from mteb.models import ModelMeta

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.errors import ArtifactError, ConfigError
from rayembed_extras.air_bench.catalogue import AirBenchDataset, Split

logger = logging.getLogger(__name__)

DEPTH = 1000
"""Maximum number of documents for each query; the leaderboard evaluates this many."""

NO_RERANKER = "NoReranker"
MADE_BY = "made_by.json"

Found = Mapping[str, Mapping[str, float]]
"""Query id → document id → score, higher is better."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ResultRecord:
    """Record of how a result file was made: model, data, versions and scores."""

    revision: str
    """Revision of the model."""
    instruction: str
    """Instruction offered to the model for queries; the model may ignore it."""
    dataset_revision: str
    mteb: str
    """Version of mteb."""
    num_documents: int
    num_queries: int
    result_sha256: str
    """SHA-256 of the result file, all of whose documents are in the corpus."""
    scores: Mapping[str, float]
    """Scores of dev splits, named as on the leaderboard (`ndcg_at_10`); empty for test splits."""


@dataclass(frozen=True)
class AirBenchResults:
    """Result files of one model for one benchmark version, by data set and split.

    Jobs get them from `open_results`, which makes sure whose they are.
    """

    folder: str
    version: str
    retriever: str
    model: str
    revision: str

    @classmethod
    def of(cls, folder: str, version: str, retriever: str) -> "AirBenchResults":
        """Open the results in a retriever's folder, whichever model made them.

        Raises:
            ArtifactError: as `made_by`.
        """
        maker = made_by(folder, version, retriever)
        return cls(folder, version, retriever, str(maker.get("model")), str(maker.get("revision")))

    def path(self, dataset: AirBenchDataset, split: Split) -> str:
        """Path of a result file."""
        return join(self._place, NO_RERANKER, dataset.result_path(split))

    def read(self, dataset: AirBenchDataset, split: Split) -> bytes:
        """Read a result file.

        Raises:
            ArtifactError: it is not there.
        """
        return read_bytes(self.path(dataset, split))

    def record(self, dataset: AirBenchDataset, split: Split) -> ResultRecord | None:
        """Record of a result file; None if the file or the record is missing."""
        path = self._record_path(dataset, split)
        if not exists(path) or not exists(self.path(dataset, split)):
            return None
        try:
            values = json.loads(read_bytes(path))
            return ResultRecord(
                **{field.name: values[field.name] for field in fields(ResultRecord)}
            )
        except (ValueError, KeyError, TypeError) as error:
            logger.warning(
                "%s cannot be read, so its result will be computed again: %s", path, error
            )
            return None

    def problem(self, dataset: AirBenchDataset, split: Split) -> str:
        """Say why a result is incomplete or from another revision; empty if it is valid."""
        record = self.record(dataset, split)
        if record is None:
            return "missing"
        if record.revision != self.revision:
            return f"made with revision {record.revision!r}, not {self.revision!r}"
        if content_hash(self.read(dataset, split)) != record.result_sha256:
            return "not what the evaluation wrote"
        return ""

    def finished(self, dataset: AirBenchDataset, split: Split, instruction: str) -> bool:
        """Whether a valid result with the same instruction exists."""
        record = self.record(dataset, split)
        if record is None or record.instruction != instruction:
            return False
        problem = self.problem(dataset, split)
        if problem:
            logger.warning(
                "%s will be computed again because it is %s", self.path(dataset, split), problem
            )
        return not problem

    def save(
        self,
        dataset: AirBenchDataset,
        split: Split,
        found: Found,
        *,
        instruction: str,
        dataset_revision: str,
        num_documents: int,
        scores: Mapping[str, float],
    ) -> ResultRecord:
        """Write a result file first, then its record.

        Args:
            found: complete and checked, with `DEPTH` documents at most for each query.
        """
        content = json.dumps(
            self.header(dataset, split) | {"search_results": found},
            ensure_ascii=False,
            allow_nan=False,
        ).encode()
        record = ResultRecord(
            revision=self.revision,
            instruction=instruction,
            dataset_revision=dataset_revision,
            mteb=version_of("mteb"),
            num_documents=num_documents,
            num_queries=len(found),
            result_sha256=content_hash(content),
            scores=dict(scores),
        )
        write_atomic(self.path(dataset, split), content)
        write_atomic(
            self._record_path(dataset, split),
            json.dumps(self.header(dataset, split) | asdict(record), indent=2).encode(),
        )
        return record

    def header(self, dataset: AirBenchDataset, split: Split) -> dict[str, str]:
        """Fields of a result file that precede the search results, in AIR-Bench's order."""
        return {
            "model_name": self.retriever,
            "reranker_name": NO_RERANKER,
            "benchmark_version": self.version,
            "task_type": dataset.task,
            "domain": dataset.domain,
            "language": dataset.language,
            "dataset_name": dataset.name,
            "split": split,
        }

    @property
    def _place(self) -> str:
        return join(self.folder, self.version, self.retriever)

    def _record_path(self, dataset: AirBenchDataset, split: Split) -> str:
        return join(self._place, f"{dataset.label}_{split}.json")


def open_results(folder: str, version: str, meta: ModelMeta) -> AirBenchResults:
    """Open a model's results below `folder` and reserve it for this model; raise if it holds
    another model's results.

    Args:
        folder: local or in object storage.
        meta: of the model, whose name is that of the folder and of the submission.

    Raises:
        ConfigError: a name that cannot be a folder's.
        ArtifactError: the folder has results of another model, of another revision, or of
            nobody knows which.
    """
    name = str(meta.name or "").replace("/", "__")  # as mteb writes it: org__model
    check_retriever_name(name)
    revision = meta.revision or "no_revision_available"
    results = AirBenchResults(folder, version, name, str(meta.name), revision)
    place = join(folder, version, name)
    path = join(place, MADE_BY)
    maker = {"model": str(meta.name), "revision": revision, "benchmark_version": version}
    if not exists(path):
        if exists(join(place, NO_RERANKER)):
            raise ArtifactError(
                f"{place!r} has results, but no {MADE_BY} that names their model; move them away "
                "or choose another folder"
            )
        write_atomic(path, json.dumps(maker, indent=2).encode())
    seen = made_by(folder, version, name)
    if seen != maker:
        raise ArtifactError(
            f"{path!r} says that the results in this folder are from {seen.get('model')!r} at "
            f"revision {seen.get('revision')!r}, not from {maker['model']!r} at {revision!r}; "
            "choose another folder, or move the old results away"
        )
    return results


def made_by(folder: str, version: str, retriever: str) -> dict[str, str]:
    """Read the model, revision and benchmark version that produced the results in a retriever's
    folder.

    Raises:
        ArtifactError: there is no such folder, or its `made_by.json` is broken.
    """
    path = join(folder, version, retriever, MADE_BY)
    if not exists(path):
        raise ArtifactError(
            f"there are no results of {version} for the retriever {retriever!r} in {folder!r}: "
            f"no file {path!r}"
        )
    try:
        values = json.loads(read_bytes(path))
    except ValueError as error:
        raise ArtifactError(f"{path!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ArtifactError(f"{path!r} does not name a model")
    return values


def check_retriever_name(name: str) -> None:
    """Check that `name` can name a folder, a zip file and a row of the leaderboard.

    The leaderboard puts names into paths, table cells and HTML, and its search splits at
    semicolons, so only letters, digits, `.`, `_` and `-` pass.

    Raises:
        ConfigError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the retriever's name {name!r} does not fit AIR-Bench's files: allowed are 1 to 128 "
            "letters, digits, '.', '_' and '-', a letter or digit first"
        )


def checked(found: Found, queries: Iterable[str], where: str) -> dict[str, dict[str, float]]:
    """Return the `DEPTH` best documents of every query, best first; raise if a query has
    none.

    Raises:
        ArtifactError: the model left a query out, found nothing for one or answered one that was
            not asked, or a score is not a finite number.
    """
    asked = list(queries)
    if unasked := sorted(set(found) - set(asked)):
        raise ArtifactError(
            f"{where}: the model returned results for queries that are not in the data set: "
            f"{unasked[:5]}"
        )
    if lost := [query for query in asked if not found.get(query)]:
        raise ArtifactError(
            f"{where}: the model returned no documents for {len(lost)} of {len(asked)} queries: "
            f"{lost[:5]}"
        )
    best: dict[str, dict[str, float]] = {}
    for query in asked:
        hits = [(float(score), str(name)) for name, score in found[query].items()]
        if any(not math.isfinite(score) for score, _ in hits):
            raise ArtifactError(f"{where}: a score of query {query!r} is not a finite number")
        hits.sort(key=lambda hit: (-hit[0], hit[1]))
        best[query] = {name: score for score, name in hits[:DEPTH]}
    return best


def content_hash(content: bytes) -> str:
    """SHA-256 of a result file."""
    return hashlib.sha256(content).hexdigest()
