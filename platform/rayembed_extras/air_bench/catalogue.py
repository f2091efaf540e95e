"""The data sets of AIR-Bench by version, and their repositories on the hub.

`catalogue.csv` has a row for each split with its published size. 24.04 has 28 data sets, all with
a test split. 24.05 has 69, of which 58 have a dev split and 64 a test split: a long document has
one of the two, and MS MARCO has dev alone.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from operator import itemgetter
from typing import Literal, cast, get_args

from rayembed.config.settings import nearest
from rayembed.errors import ConfigError

Version = Literal["AIR-Bench_24.04", "AIR-Bench_24.05"]
Task = Literal["qa", "long-doc"]
Split = Literal["dev", "test"]

VERSIONS: tuple[Version, ...] = get_args(Version)

_ORGANISATION = "AIR-Bench"
_WITHOUT_SPLIT_NAMES: Version = "AIR-Bench_24.04"
"""The version that has only one split and no split name on the hub."""


@dataclass(frozen=True)
class AirBenchDataset:
    """An AIR-Bench data set: a corpus with the queries of its splits."""

    version: Version
    task: Task
    domain: str
    language: str
    """ISO 639-1."""
    name: str
    """`default`, or the name of the long document."""
    num_documents: int
    """Number of documents, as published."""
    num_queries: Mapping[Split, int] = field(hash=False)
    """Number of queries of each split, as published."""

    @property
    def splits(self) -> tuple[Split, ...]:
        """Splits that the data set has: `dev`, `test` or both, in this order."""
        return tuple(self.num_queries)

    @property
    def repository(self) -> str:
        """Hub repository of corpus and queries, whose configuration name is the benchmark's
        version.
        """
        return f"{_ORGANISATION}/{self._place}"

    @property
    def labels_repository(self) -> str:
        """Hub repository of the dev splits' labels; labels of test splits are not public."""
        return f"{_ORGANISATION}/qrels-{self._place}-dev"

    @property
    def corpus_split(self) -> str:
        """Name of the hub split with the documents."""
        return f"corpus_{self._name_on_hub}"

    def queries_split(self, split: Split) -> str:
        """Name of the hub split with the queries."""
        return f"queries_{self._name_on_hub}{self._ending(split)}"

    def labels_split(self, split: Split) -> str:
        """Name of the hub split with the labels."""
        return f"qrels_{self._name_on_hub}{self._ending(split)}"

    @property
    def label(self) -> str:
        """Unique name of the data set within its version: `qa_arxiv_en_default`."""
        return f"{self._place}_{self.name}"

    def result_path(self, split: Split) -> str:
        """Path of the search results in AIR-Bench's own folder layout, relative to the reranker's
        folder.
        """
        return f"{self.task}/{self.domain}/{self.language}_{self.name}_{split}.json"

    @property
    def _place(self) -> str:
        return f"{self.task}_{self.domain}_{self.language}"

    @property
    def _name_on_hub(self) -> str:
        return self.name.replace("-", "_")

    def _ending(self, split: Split) -> str:
        return "" if self.version == _WITHOUT_SPLIT_NAMES else f"_{split}"


def air_bench_datasets(
    version: str,
    *,
    tasks: Sequence[str] = (),
    domains: Sequence[str] = (),
    languages: Sequence[str] = (),
    splits: Sequence[str] = (),
) -> tuple[AirBenchDataset, ...]:
    """Select the data sets of a version that have the requested splits, in the catalogue's
    order.

    Args:
        tasks: `qa`, `long-doc`; none: both. So with the others: none means all.
        domains: as `arxiv`.
        languages: ISO 639-1, as `en`.
        splits: `dev`, `test`.

    Raises:
        ConfigError: an unknown version, task, domain, language or split, or none that has all
            that is wanted.
    """
    if version not in VERSIONS:
        raise ConfigError(f"no version {version!r} of AIR-Bench; {nearest(version, VERSIONS)}")
    found = _catalogue()[version]
    wanted = {"task": tasks, "domain": domains, "language": languages}
    for what, values in wanted.items():
        _check(version, what, values, (getattr(dataset, what) for dataset in found))
    _check(version, "split", splits, (split for dataset in found for split in dataset.splits))
    chosen = tuple(
        kept
        for dataset in found
        if all(not values or getattr(dataset, what) in values for what, values in wanted.items())
        and (kept := _with_splits(dataset, splits)).splits
    )
    if not chosen:
        names = ", ".join([*tasks, *domains, *languages, *splits])
        raise ConfigError(f"{version} has no data set that matches all of {names}")
    return chosen


def _with_splits(dataset: AirBenchDataset, splits: Sequence[str]) -> AirBenchDataset:
    kept = {
        split: count
        for split, count in dataset.num_queries.items()
        if not splits or split in splits
    }
    return replace(dataset, num_queries=kept)


def _check(version: str, what: str, wanted: Sequence[str], known: Iterable[str]) -> None:
    allowed = set(known)
    for value in wanted:
        if value not in allowed:
            raise ConfigError(f"{version} has no {what} {value!r}; {nearest(value, allowed)}")


@cache
def _catalogue() -> dict[str, tuple[AirBenchDataset, ...]]:
    text = (files(__package__) / "catalogue.csv").read_text(encoding="utf-8")
    found: dict[str, list[AirBenchDataset]] = {version: [] for version in VERSIONS}
    columns = itemgetter("version", "task", "domain", "language", "dataset", "num_documents")
    for key, rows in groupby(csv.DictReader(text.splitlines()), columns):
        version, task, domain, language, name, documents = key
        queries = {cast("Split", row["split"]): int(row["num_queries"]) for row in rows}
        found[version].append(
            AirBenchDataset(version, task, domain, language, name, int(documents), queries)
        )
    return {version: tuple(datasets) for version, datasets in found.items()}
