"""Tables 3 and 4 of Nomic Embed v2 (arXiv 2502.07972), as they are printed."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class PrintedScore:
    """A cell of a table."""

    table: str
    model: str
    """The row's label."""
    benchmark: str
    task: str
    """Our name of the task; empty: the average."""
    metric: str
    """Metric as the table prints it; empty where it prints none."""
    score: float
    """Score in percent."""


@cache
def printed() -> tuple[PrintedScore, ...]:
    """All cells of the tables, in their order."""
    text = files(__package__).joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(
        PrintedScore(**{**line, "score": float(line["score"])})  # type: ignore[arg-type]
        for line in csv.DictReader(text.splitlines())
    )


def printed_models(benchmark: str) -> tuple[str, ...]:
    """The rows of a benchmark's table."""
    return tuple(dict.fromkeys(cell.model for cell in printed() if cell.benchmark == benchmark))


def printed_score(model: str, benchmark: str, task: str) -> float:
    """Printed score in percent; the table's average where `task` is empty."""
    (cell,) = (c for c in printed() if (c.model, c.benchmark, c.task) == (model, benchmark, task))
    return cell.score
