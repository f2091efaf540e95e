"""Tabulate a sweep's results: each trial, and rows that average over seeds."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rayembed.display.tables import Table, show
from rayembed_extras.sweeps.seeds import Difference, Spread, difference, paired, spread
from rayembed_extras.sweeps.settings import GridSearch, Sweep
from rayembed_extras.sweeps.trial_store import SEED, TrialRecord


@dataclass(frozen=True)
class TrialRow:
    """Row of the result table: all trials of one run with the same settings, over all seeds."""

    label: str
    values: Mapping[str, str]
    """Setting values without the seed."""
    records: tuple[TrialRecord, ...]
    short: Mapping[str, str]
    """Path of each setting → its name, as `short_names` gives it."""

    @property
    def name(self) -> str:
        """Label of the row."""
        values = ", ".join(f"{self.short[p]}={_number(v)}" for p, v in self.values.items())
        return ", ".join(part for part in (self.label, values) if part)

    @property
    def scores(self) -> dict[str, Spread]:
        """Mean and deviation of each task's finite scores over finished trials; `score` is the
        deciding score.
        """
        finished = [r for r in self.records if r.state == "finished" and r.final is not None]
        found: dict[str, list[float]] = {}
        for record in finished:
            assert record.final is not None
            tasks = record.evaluation or record.final.scores
            for task, score in {"score": record.final.score, **tasks}.items():
                if math.isfinite(score):
                    found.setdefault(task, []).append(score)
        return {task: spread(scores) for task, scores in found.items()}

    @property
    def by_seed(self) -> dict[str, float]:
        """Seed → deciding score of its finished trials, averaged if there are several; seed "" if
        none is searched.
        """
        found: dict[str, list[float]] = {}
        for record in self.records:
            if record.state == "finished" and record.final and math.isfinite(record.final.score):
                found.setdefault(record.values.get(SEED, ""), []).append(record.final.score)
        return {seed: fmean(scores) for seed, scores in found.items()}

    def apart(self, reference: "TrialRow") -> Difference | None:
        """Compare the score that ranks trials with another row, seed by seed, and return the mean
        difference; None without a common seed.
        """
        found = paired(self.by_seed, reference.by_seed)
        return difference(found) if found else None


def reference_of(sweep: Sweep, rows: Sequence[TrialRow]) -> TrialRow | None:
    """Choose the row that others are compared with: the first in a grid, else the best; only rows
    with the most seeds count.
    """
    most = max((len(row.by_seed) for row in rows), default=0)
    whole = [row for row in rows if row.by_seed and len(row.by_seed) == most]
    if not whole:
        return None
    if isinstance(sweep.search, GridSearch):
        return whole[0]
    return max(whole, key=lambda row: row.scores["score"].mean)


def rows_of(sweep: Sweep, records: Mapping[str, TrialRecord]) -> list[TrialRow]:
    """Group trials that differ only in the seed into rows, in the order of the sweep's runs and
    values.
    """
    order = {label: place for place, label in enumerate(sweep.runs)}
    grouped: dict[tuple[str, tuple[tuple[str, str], ...]], list[TrialRecord]] = {}
    short = short_names({path for record in records.values() for path in record.values})
    for record in records.values():
        values = {path: value for path, value in record.values.items() if path != SEED}
        grouped.setdefault((record.label, tuple(values.items())), []).append(record)
    listed = {
        path: {value: place for place, value in enumerate(domain.values)}
        for path, domain in sweep.domains.items()
    }

    def place(key: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[int, list[float]]:
        label, values = key
        places = [float(listed.get(path, {}).get(value, 0)) for path, value in values]
        return order.get(label, len(order)), places

    return [
        TrialRow(label, dict(values), tuple(grouped[label, values]), short)
        for label, values in sorted(grouped, key=place)
    ]


def trials_table(sweep: Sweep, records: Mapping[str, TrialRecord]) -> str:
    """Write a Markdown table of the trials, best first."""
    paths, short = list(sweep.domains), short_names(list(sweep.domains))
    several = ["run"] if len(sweep.runs) > 1 else []
    lines = [
        [
            record.key,
            *(record.label for _ in several),
            *(_number(record.values.get(path, "")) for path in paths),
            record.state,
            str(record.last_step or ""),
            _first_words(record.problem) if record.score is None else f"{record.score:.4f}",
        ]
        for record in sorted(records.values(), key=_highest_first)
    ]
    heads = ["trial", *several, *(short[path] for path in paths), "state", "steps", "score"]
    return show(Table(heads, lines), "markdown")


def _first_words(problem: str) -> str:
    """Shorten an error for a table cell."""
    return " ".join(problem.split())[:80].replace("|", "/")


def rows_table(rows: Sequence[TrialRow], reference: TrialRow | None) -> str:
    """Write a Markdown table of rows in percent: mean ± standard deviation over seeds, difference
    to the reference, and each task's mean.
    """
    tasks = list(dict.fromkeys(task for row in rows for task in row.scores if task != "score"))
    header = ["row", "seeds", "score", "difference", *tasks]
    lines = []
    for row in rows:
        scores = row.scores
        number = scores["score"].number if "score" in scores else 0
        apart = None if reference is None or row is reference else row.apart(reference)
        shown = [percent(scores[task]) if task in scores else "" for task in ("score", *tasks)]
        shown.insert(1, "" if apart is None else apart.text(digits=2, times=100))
        lines.append([row.name or "(the recipe)", str(number), *shown])
    return show(Table(header, lines), "markdown")


def paper_table(rows: Sequence[TrialRow], printed: Mapping[str, Mapping[str, float]]) -> str:
    """Write a Markdown table of each row's deciding score next to the paper's; rows that were not
    run show the paper's only.

    Args:
        printed: the paper's row → column → figure, of 100.
    """
    columns = list(dict.fromkeys(column for figures in printed.values() for column in figures))
    measured = {row.name: row.scores for row in rows}
    lines = []
    for name in dict.fromkeys([*printed, *measured]):
        scores = measured.get(name, {})
        figures = printed.get(name, {})
        lines.append(
            [
                name,
                str(scores["score"].number) if "score" in scores else "",
                percent(scores["score"]) if "score" in scores else "not measured",
                *(f"{figures[column]:g}" if column in figures else "" for column in columns),
            ]
        )
    heads = ["row", "seeds", "measured", *(f"paper: {c}" for c in columns)]
    return show(Table(heads, lines), "markdown")


def trials_csv(sweep: Sweep, records: Mapping[str, TrialRecord]) -> str:
    """Write a CSV of every trial with its values and all scores."""
    found = {
        key: {**(record.final.scores if record.final else {}), **record.evaluation}
        for key, record in records.items()
    }
    paths = list(sweep.domains)
    tasks = sorted({task for scores in found.values() for task in scores})
    rows = [
        [
            *(key, record.label, *(record.values.get(path, "") for path in paths), record.state),
            *(record.last_step or "", "" if record.score is None else record.score),
            *(found[key].get(task, "") for task in tasks),
        ]
        for key, record in records.items()
    ]
    heads = ["trial", "run", *paths, "state", "steps", "score", *tasks]
    return show(Table(heads, rows), "csv")


def percent(found: Spread) -> str:
    """Format mean and standard deviation of a score in percent."""
    return found.text(digits=2, times=100)


def _highest_first(record: TrialRecord) -> tuple[int, float]:
    score = record.score
    rank = ("finished", "stopped", "begun", "failed").index(record.state)
    return rank, -score if score is not None and math.isfinite(score) else math.inf


def short_names(paths: Collection[str]) -> dict[str, str]:
    """Shorten setting paths to their last parts, at least two and as many as make them unique."""
    return {path: _short(path, [other for other in paths if other != path]) for path in paths}


def _short(path: str, others: Collection[str]) -> str:
    parts = path.split(".")
    for number in range(2, len(parts)):
        short = parts[-number:]
        if all(other.split(".")[-number:] != short for other in others):
            return ".".join(short)
    return path


def _number(text: str) -> str:
    """Round a sampled number to a readable number of digits."""
    try:
        return text if len(text) < 8 else f"{float(text):.4g}"
    except ValueError:
        return text
