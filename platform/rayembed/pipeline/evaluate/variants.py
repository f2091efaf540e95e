"""Make and score several variants of a model, choose one, and tabulate all."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Generic, TypeVar

from rayembed.config.evaluation import EvaluationPlacement, EvaluationRun, ModelUnderTest
from rayembed.config.own_sets import Scores
from rayembed.display.progress import doing
from rayembed.display.tables import MISSING, Cell, Table, show
from rayembed.evaluation.score import ModelScores
from rayembed.evaluation.tables import ScoreTable, score_table
from rayembed.pipeline.evaluate.evaluate import evaluate

MEGABYTE = 1e6

ROUNDING = 1e-9
"""Error of a float that a difference of scores, which have five decimals, may have."""

T = TypeVar("T")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Variant(Generic[Made]):
    """One of several models to compare, with the function that makes it."""

    label: str
    """Label for readers; it is no key."""
    make: Callable[[], Made]
    """Function that makes the model unless it exists, and returns the caller's handle of it."""


@dataclass(frozen=True)
class Scored(Generic[Made]):
    """A variant after it was made, with its scores."""

    label: str
    made: Made
    result: ModelScores | None = None
    """Scores of the variant; None if it is not scored."""

    @property
    def scores(self) -> dict[str, float]:
        """Main score by task."""
        return {} if self.result is None else self.result.scores

    @property
    def mean(self) -> float | None:
        """Mean of the tasks' scores; None without scores."""
        return fmean(self.scores.values()) if self.scores else None


def score_all(
    variants: Iterable[Variant[Made]], score: Callable[[str, Made], ModelScores | None]
) -> Iterator[Scored[Made]]:
    """Make and score the variants one after the other.

    Args:
        score: scores a variant, of which it gets the label and what was made.
    """
    for variant in variants:
        made = variant.make()
        yield Scored(variant.label, made, score(variant.label, made))


def score_saved(
    label: str, model: ModelUnderTest, scores: Scores, placement: EvaluationPlacement
) -> ModelScores:
    """Score a saved model on all tasks, in the same way as an evaluation job.

    Raises:
        RayembedError: a task has no score.
    """
    tasks = {name: getattr(scores, name) for name in Scores.model_fields}
    with doing(f"scoring {label}"):
        result = evaluate(
            EvaluationRun(model=model, placement=placement, baselines="none", **tasks)
        )
    for _, error in result.failed:
        raise error
    return result.scored


def choose(
    candidates: Sequence[T],
    gain: Callable[[T], float | None],
    *,
    near: Callable[[T, T], bool] = lambda best, other: False,
    cost: Callable[[T], float] = lambda candidate: 0.0,
) -> T:
    """Choose the cheapest candidate among the best one and all that count as equally good.

    Of equal costs the highest gain decides, of equal gains the order.

    Args:
        gain: higher is better; None and NaN are below every number.
        near: whether another candidate counts as good as the best.
        cost: lower is better.
    """
    best = _first_highest(candidates, gain)
    left = [one for one in candidates if one is best or near(best, one)]
    least = min(map(cost, left))
    return _first_highest([one for one in left if cost(one) <= least + ROUNDING], gain)


def _first_highest(candidates: Sequence[T], gain: Callable[[T], float | None]) -> T:
    gains = [-math.inf if (x := gain(one)) is None or math.isnan(x) else x for one in candidates]
    return candidates[next(i for i, x in enumerate(gains) if x >= max(gains) - ROUNDING)]


def variants_table(
    title: str, rows: Sequence[tuple[str, Mapping[str, object]]], kept: Sequence[bool] = ()
) -> Table:
    """Make a table with a row for each variant; the chosen one is marked.

    Args:
        rows: label of each variant, and its cells by their headings.
        kept: of each row whether its variant is kept; empty: none is chosen.
    """
    heads = list(dict.fromkeys(head for _, figures in rows for head in figures))
    cells: list[list[object]] = [
        [label, *(figures.get(head, MISSING) for head in heads)] for label, figures in rows
    ]
    if kept:
        heads.append("")
        cells = [[*row, "kept" if one else ""] for row, one in zip(cells, kept, strict=True)]
    return Table(["variant", *heads], cells, title=title, align="lr")


def report_tables(
    title: str,
    scored: Sequence[Scored[Made]],
    figures: Callable[[Made], Mapping[str, object]] = lambda made: {},
    *,
    kept: Scored[Made] | None = None,
) -> list[Table]:
    """Make the table of scored variants, and a second one of their scores by task if there are
    several tasks.

    The first variant is what the others are compared with.

    Args:
        figures: heading → cell, of what was made.
    """
    first = scored[0]
    rows: list[tuple[str, Mapping[str, object]]] = []
    for one in scored:
        means: dict[str, object] = {}
        if first.scores:
            share = math.nan if one.mean is None or not first.mean else one.mean / first.mean
            of_first = MISSING if math.isnan(share) else f"{share:.1%}"
            means = {"mean": Cell(one.mean, digits=4), f"of {first.label}": of_first}
        rows.append((one.label, {**figures(one.made), **means}))
    table = variants_table(title, rows, [] if kept is None else [one is kept for one in scored])
    tasks = ScoreTable({one.label: one.scores for one in scored}, base=first.label)
    return [table, *([score_table(tasks)] if len(tasks.tasks) > 1 else [])]


def report_files(name: str, tables: Sequence[Table]) -> dict[str, bytes]:
    """Contents of the report's files by name: `NAME.md` with all tables, `NAME.csv` with the first
    table.
    """
    text = "\n".join(show(table, "markdown") for table in tables)
    return {f"{name}.md": text.encode(), f"{name}.csv": show(tables[0], "csv").encode()}


def folder_bytes(folder: Path) -> int:
    """Sum the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
