"""Read the papers' figures: scores of tasks, categories and benchmarks, each with its
source.

Sources: NV-Embed (arXiv 2405.17428), Tables 1, 9, 10, 14; Nomic Embed v2 MoE (2502.07972), Tables
1, 5, 12; Contextual Document Embeddings (2410.02525), Tables 2, 7; Causal2Vec (2507.23386), Tables
1, 17, 18. Scores are the papers', 100 times mteb's. Where a paper's average is not the mean of its
own rows, the file keeps what is printed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed_papers.printed import rows_of

PAPERS: Mapping[str, str] = {
    "nvembed": "NV-Embed",
    "nomic_v2_moe": "Nomic Embed v2 MoE",
    "cde": "Contextual Document Embeddings",
    "causal2vec": "Causal2Vec",
}
"""Name of a data file → short name of its paper."""

Level = Literal["task", "category", "average", "benchmark"]
"""Scope of a figure: one task, all tasks of a category, some other part, the whole."""


@dataclass(frozen=True)
class Figure:
    """A score printed in a paper's table."""

    paper: str
    """Name of the paper."""
    table: str
    model: str
    """Our short name of the model, the same in all tables."""
    benchmark: str
    level: Level
    name: str
    """mteb's name of the task or the category; empty for the whole benchmark."""
    subset: str
    """The language, if the score is for one language of a task; else empty."""
    metric: str
    score: float
    """Score in the unit, as printed."""
    unit: str
    """`percent`: 100 times what mteb writes."""
    row: str
    """The table's own label of the row, and …"""
    column: str
    """… of the column."""

    @property
    def source(self) -> str:
        """Paper and table that print the score."""
        return f"{self.paper}, Table {self.table}"


def figures(benchmark: str | None = None, model: str | None = None) -> tuple[Figure, ...]:
    """Read the printed scores of a benchmark and a model, in the order of the papers; None selects
    all.

    Raises:
        ConfigError: no paper has figures of that benchmark, or of that model.
    """
    found = _all()
    if benchmark is not None:
        check_name("benchmark", benchmark, benchmarks())
    if model is not None:
        check_name("model", model, labels())
    return tuple(
        figure
        for figure in found
        if benchmark in (None, figure.benchmark) and model in (None, figure.model)
    )


def benchmarks() -> tuple[str, ...]:
    """Names of the benchmarks with printed scores."""
    return tuple(dict.fromkeys(figure.benchmark for figure in _all()))


@cache
def labels() -> Mapping[str, str]:
    """Short name of each model with printed scores → its label in tables and plots."""
    return {line["model"]: line["label"] for line in rows_of(__package__, "models")}


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise if no paper prints scores under this name.

    Raises:
        ConfigError: it is not; names the nearest.
    """
    known = tuple(known)
    if name not in known:
        raise ConfigError(
            f"there are no published scores of the {kind} {name!r}; {nearest(name, known)}"
        )


@cache
def _all() -> tuple[Figure, ...]:
    return tuple(
        Figure(**{"paper": name, **line, "score": float(line["score"])})  # type: ignore[arg-type]
        for paper, name in PAPERS.items()
        for line in rows_of(__package__, paper)
    )
