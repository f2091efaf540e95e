"""Load AIR-Bench's corpora, queries and labels from the Hugging Face hub, memory-mapped.

Only labels become Python values: a few thousand judgements. A corpus stays in Arrow files in the
cache of `datasets`, whatever its size; AIR-Bench's own loader makes a dictionary of it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import httpx
import pyarrow
import pyarrow.compute
from datasets import Dataset, Value
from datasets.exceptions import DatasetGenerationError, DatasetsError
from huggingface_hub import HfApi

from rayembed.assets.hub_client import limit_hub, unavailable, with_retries
from rayembed.errors import DataError
from rayembed_extras.air_bench.catalogue import AirBenchDataset, Split

logger = logging.getLogger(__name__)

Labels = Mapping[str, Mapping[str, int]]
"""Query id → document id → relevance; 0 for judged and not relevant."""

_TEXTS = ("id", "text")
_LABELS = ("qid", "docid", "relevance")
_CHANGED = "AIR-Bench may have changed the layout of its repositories"


@dataclass(frozen=True)
class AirBenchData:
    """Corpus and queries of a data set. Both have the columns `id` and `text`, strings."""

    corpus: Dataset
    queries: Mapping[Split, Dataset]
    revision: str
    """Commit of the repository; empty for cached data when the hub was not reached."""


def load_data(dataset: AirBenchDataset, cache: str | None = None) -> AirBenchData:
    """Load the corpus and the queries of all splits of `dataset`, from the hub or its local
    cache.

    Args:
        cache: folder in place of the one of `datasets` (`HF_DATASETS_CACHE`).

    Raises:
        AssetError: the repository is not there, gated or not reachable.
        DataError: it is laid out in another way, or ids are missing or not unique.
    """
    found = _load(dataset.repository, dataset.version, cache)
    corpus = _texts(found, dataset.corpus_split)
    queries = {split: _texts(found, dataset.queries_split(split)) for split in dataset.splits}
    _compare(dataset, "documents", len(corpus), dataset.num_documents)
    for split, rows in queries.items():
        _compare(dataset, f"{split} queries", len(rows), dataset.num_queries[split])
    return AirBenchData(corpus, queries, found.commit)


def load_labels(dataset: AirBenchDataset, cache: str | None = None) -> Labels:
    """Load the public labels of the dev split.

    Raises:
        AssetError: as `load_data`.
        DataError: as `load_data`.
    """
    found = _load(dataset.labels_repository, dataset.version, cache)
    columns = _columns(found, dataset.labels_split("dev"), _LABELS).to_dict()
    labels: dict[str, dict[str, int]] = {}
    for query, document, relevance in zip(*(columns[name] for name in _LABELS), strict=True):
        labels.setdefault(str(query), {})[str(document)] = int(relevance)
    return labels


def unknown_ids(corpus: Dataset, ids: set[str]) -> list[str]:
    """Return the sorted ids that no document of the corpus has."""
    asked = pyarrow.array(sorted(ids), pyarrow.string())
    known = _column(corpus, "id").combine_chunks().cast(pyarrow.string())
    missing = pyarrow.compute.invert(pyarrow.compute.is_in(asked, value_set=known))
    return [str(name) for name in asked.filter(missing).to_pylist()]


@dataclass(frozen=True)
class _Configuration:
    """All splits of a hub repository for one benchmark version, at one commit."""

    where: str
    splits: Mapping[str, Dataset]
    commit: str


def _load(repository: str, version: str, cache: str | None) -> _Configuration:
    """Load the repository's splits for one benchmark version, all at the same commit.

    A commit that is named also spares a request to the hub's data set viewer, which mirrors lack.
    """
    reference = f"hf://datasets/{repository}"
    commit = _commit(repository)

    def load() -> Any:
        limit_hub()
        return datasets.load_dataset(
            repository, version, revision=commit or None, cache_dir=cache, keep_in_memory=False
        )

    try:
        found = with_retries(load, reference)
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        raise DataError(f"{reference} ({version}) cannot be read: {cause}") from error
    except (OSError, httpx.HTTPError, DatasetsError) as error:
        raise unavailable(reference, error) from error
    except ValueError as error:
        raise DataError(
            f"{reference} has no configuration {version!r}: {error}. {_CHANGED}"
        ) from error
    return _Configuration(f"{reference} ({version})", found, commit)


def _commit(repository: str) -> str:
    """Ask the hub for the repository's current commit; empty if the hub cannot be reached.

    Raises:
        AssetError: the repository is not there or not for us.
    """
    # Where `datasets` will look, which reads HF_ENDPOINT when it is imported.
    api = HfApi(endpoint=datasets.config.HF_ENDPOINT)
    try:
        return str(with_retries(lambda: api.dataset_info(repository).sha, repository))
    except (ConnectionError, httpx.TransportError) as error:
        logger.warning("the hub does not answer (%s); reading %s from the cache", error, repository)
        return ""
    except (OSError, httpx.HTTPError) as error:
        raise unavailable(f"hf://datasets/{repository}", error) from error


def _columns(found: _Configuration, split: str, columns: tuple[str, ...]) -> Dataset:
    """Read the named columns of a split; raise if one is missing or the split is empty."""
    if split not in found.splits:
        raise DataError(
            f"{found.where} has no split {split!r}; it has {', '.join(found.splits)}. {_CHANGED}"
        )
    rows = found.splits[split]
    if lacking := [name for name in columns if name not in rows.column_names]:
        raise DataError(
            f"{found.where}, split {split!r}: no column {', '.join(lacking)}; it has "
            f"{', '.join(rows.column_names)}. {_CHANGED}"
        )
    if not len(rows):
        raise DataError(f"{found.where}: the split {split!r} has no rows")
    return rows.select_columns(list(columns))


def _texts(found: _Configuration, split: str) -> Dataset:
    """Read ids and texts of a split; raise if any is missing or an id occurs twice."""
    rows = _columns(found, split, _TEXTS)
    where = f"{found.where}, split {split!r}"
    for name in _TEXTS:
        if rows.features[name] != Value("string"):
            rows = rows.cast_column(name, Value("string"))
        if missing := _column(rows, name).null_count:
            raise DataError(f"{where}: {missing} rows have no {name!r}, which each row needs")
    if (distinct := pyarrow.compute.count_distinct(_column(rows, "id")).as_py()) < len(rows):
        raise DataError(
            f"{where}: {len(rows)} rows have only {distinct} distinct ids, but each row needs its "
            "own id"
        )
    return rows


def _column(dataset: Dataset, name: str) -> pyarrow.ChunkedArray:
    """Return a whole column as a memory-mapped Arrow array."""
    return dataset.data.table.column(name)


def _compare(dataset: AirBenchDataset, what: str, seen: int, published: int) -> None:
    if seen != published:
        logger.warning(
            "%s, data set %s: the hub has %d %s, but %d were published; scores may differ from "
            "published scores",
            dataset.version, dataset.label, seen, what, published,
        )  # fmt: skip
