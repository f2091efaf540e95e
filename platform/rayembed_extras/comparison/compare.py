"""Compare models on a benchmark: their scores and the differences.

Everything here is in percent, 100 times mteb's scores, as papers print them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.results.costs import Cost, total
from rayembed.results.intervals import PairedDifference, Parts, mean_difference
from rayembed.results.items import Items
from rayembed.results.scores import TaskScore, is_beside
from rayembed_extras.comparison.benchmark_lines import Line, average_groups, averages, by_category
from rayembed_extras.comparison.results import StoredModel

PERCENT = 100.0
"""Factor between mteb's fractions and percentage points."""


@dataclass(frozen=True)
class LineScore:
    """Score of a model in one row of a benchmark's table, or the names of its missing parts."""

    score: float | None
    """Mean over splits and subsets, from 0 to 1; None while any is missing."""
    missing: tuple[str, ...]
    """Splits, subsets or parts without a score, as shown to users."""
    files: tuple[TaskScore, ...]
    """Result files of the score, also of an incomplete one."""


@dataclass(frozen=True)
class Origin:
    """Where a score comes from: result files, or a paper's table."""

    source: str
    """Table of a paper, or revision of the measured model."""
    dataset_revisions: tuple[str, ...] = ()
    mteb_versions: tuple[str, ...] = ()
    date: str = ""
    """Date of the measurement; empty if not known."""
    files: tuple[TaskScore, ...] = ()
    """Result files of the score; empty for a paper's score."""


@dataclass(frozen=True)
class Column:
    """One model of a comparison, with its scores and their origins."""

    label: str
    published: bool
    """Whether a paper published the scores."""
    scores: Mapping[str, float]
    """Line of the benchmark → score; lines without a score are left out."""
    averages: Mapping[str, float]
    """Category or `MEAN` → average; incomplete ones are left out."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Line, category or `MEAN` → origin of its score; computed averages have none."""
    name: str = ""
    """`<org>/<model>`, or the short name of a published model."""
    notes: tuple[str, ...] = ()
    """Notes on the scores for the reader."""
    items: Mapping[str, Parts] = field(default_factory=dict)
    """Line → outcomes of test items, of lines that have such."""
    cost: Cost = field(default_factory=Cost)
    """Cost of the corpora of all lines, as far as it was measured."""


@dataclass(frozen=True)
class ModelComparison:
    """Scores of several models on the tasks of one benchmark."""

    benchmark: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    baseline: str | None = None
    """Label of the model from which differences are computed; None: no differences."""

    @property
    def categories(self) -> dict[str, tuple[Line, ...]]:
        """Category → its table rows, in the order of the papers."""
        return by_category(self.lines)

    @property
    def averages(self) -> dict[str, tuple[Line, ...]]:
        """Name of each average for which some model has a score → its table rows."""
        return {
            name: lines
            for name, lines in average_groups(self.benchmark, self.lines).items()
            if any(name in c.averages or self.scored(c, lines) for c in self.columns)
        }

    @property
    def base(self) -> Column | None:
        """The baseline model, from which differences are computed; None without one."""
        return next((c for c in self.columns if c.label == self.baseline), None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the scores and their differences for the reader."""
        own = [note for column in self.columns for note in column.notes]
        return (*own, *(note for column in self.columns for note in self._notes_against(column)))

    def other_data(self, column: Column) -> frozenset[str]:
        """Names of the tasks on which a model and the baseline were scored on different data."""
        pairs = self._with_baseline(column)
        return frozenset(
            name
            for name, files in pairs.items()
            if any(here.dataset_revision != there.dataset_revision for here, there in files)
        )

    def _with_baseline(self, column: Column) -> dict[str, list[tuple[TaskScore, TaskScore]]]:
        """Table row → pairs of result files, the model's and the baseline's, for each task that
        both have.
        """
        base = self.base
        if base is None or column is base:
            return {}
        found = {}
        for name in column.origins.keys() & base.origins.keys():
            theirs = {file.task: file for file in base.origins[name].files}
            ours = column.origins[name].files
            found[name] = [(file, theirs[file.task]) for file in ours if file.task in theirs]
        return found

    def _notes_against(self, column: Column) -> list[str]:
        notes = []
        if other := self.other_data(column):
            named = _few([line.name for line in self.lines if line.name in other])
            notes.append(
                f"{column.label}: scored on other data than {self.baseline}, so no difference is "
                f"shown: {named}. Score both on the same data to compare them."
            )
        found: dict[str, tuple[str, str]] = {}
        lines: dict[str, set[str]] = {}
        for name, files in self._with_baseline(column).items():
            for here, there in files:
                if here.measured_with and there.measured_with:
                    differing = here.differences(there)
                    found = differing | found
                    for setting in differing:
                        lines.setdefault(setting, set()).add(name)
        if found:
            conditions = "; ".join(
                f"{setting} {values[0]!r}, there {values[1]!r} ({len(lines[setting])} tasks)"
                for setting, values in sorted(found.items())
            )
            notes.append(
                f"{column.label}: scored in another way than {self.baseline}: {conditions}."
            )
        return notes

    def difference(self, column: Column, name: str) -> float | None:
        """Subtract the baseline's score or average; None if a score is missing or the data
        differ.
        """
        base = self.base
        if base is None or column is base:
            return None
        members = average_groups(self.benchmark, self.lines).get(name, ())
        if self.other_data(column) & {name, *(line.name for line in members)}:
            return None
        ours, theirs = value(column, name), value(base, name)
        return None if ours is None or theirs is None else ours - theirs

    def paired(self, column: Column, name: str) -> PairedDifference | None:
        """Difference from the baseline on a task or average, with a 95 % interval over items, and
        over tasks for averages of five or more; None where `difference` is None.
        """
        key = column.label, name
        if key not in self._paired:
            self._paired[key] = self._interval(column, name)
        return self._paired[key]

    @cached_property
    def _paired(self) -> dict[tuple[str, str], PairedDifference | None]:
        """Cache of computed intervals, because several tables show them."""
        return {}

    def _interval(self, column: Column, name: str) -> PairedDifference | None:
        difference, base = self.difference(column, name), self.base
        if difference is None or base is None:
            return None
        members = average_groups(self.benchmark, self.lines).get(name, ())
        lines = [line.name for line in members] or [name]
        if not all(line in column.scores and line in base.scores for line in lines):
            return PairedDifference(difference)  # an average that a paper states
        apart = {line: (column.scores[line] - base.scores[line]) / PERCENT for line in lines}
        found = mean_difference(apart, column.items, base.items, over_tasks=bool(members))
        return replace(found.times(PERCENT), mean=difference)

    def scored(self, column: Column, lines: Sequence[Line]) -> int:
        """Count the given table rows for which a model has a score."""
        return sum(line.name in column.scores for line in lines)

    def missing(self, column: Column) -> tuple[Line, ...]:
        """Table rows for which a model has no score."""
        return tuple(line for line in self.lines if line.name not in column.scores)


def value(column: Column, name: str) -> float | None:
    """Look up a model's score on a task, or its average of a category (or `MEAN`), by name."""
    found = column.averages.get(name)
    return column.scores.get(name) if found is None else found


def measured(
    model: StoredModel,
    results: Mapping[str, TaskScore],
    benchmark: str,
    lines: Sequence[Line],
    *,
    label: str,
) -> Column:
    """Build a column of the comparison from a model's result files."""
    taken = {line.name: score_of(line, results) for line in lines}
    scores = {
        name: PERCENT * found.score for name, found in taken.items() if found.score is not None
    }
    return Column(
        label=label,
        published=False,
        scores=scores,
        averages=averages(scores, average_groups(benchmark, lines)),
        origins={name: _origin(model, taken[name]) for name in scores},
        name=model.name,
        notes=_notes(label, lines, taken),
        items={line.name: _items(line, taken[line.name]) for line in lines},
        cost=total(
            {f.task: f.cost for one in taken.values() for f in one.files if f.cost is not None}
        ),
    )


def _items(line: Line, found: LineScore) -> list[Items]:
    """Outcomes of test items for each split and subset of a task; empty if any split or subset
    has none.

    Of an aggregate a part has the weight of its share of all places, so parts with different
    numbers of places give none.
    """
    parts = line.parts or (line,)
    if len({len(part.places) for part in parts}) > 1:
        return []
    files = {file.task: file.items for file in found.files}
    places = [(files.get(part.task, {}), place) for part in parts for place in part.places]
    if not all(place in items for items, place in places):
        return []
    return [items[place] for items, place in places]


def score_of(line: Line, results: Mapping[str, TaskScore]) -> LineScore:
    """Compute the score of one table row of a benchmark from result files.

    An aggregate is the mean of its parts where all are there, else what its own file says.
    """
    if not line.parts:
        return _own_score(line, results)
    parts = {part.name: score_of(part, results) for part in line.parts}
    known = [found.score for found in parts.values() if found.score is not None]
    files = tuple(file for found in parts.values() for file in found.files)
    if len(known) == len(parts):
        return LineScore(math.fsum(known) / len(known), (), files)
    alone = _own_score(line, results)
    if alone.score is not None:
        return alone
    missing = tuple(name for name, found in parts.items() if found.score is None)
    return LineScore(None, missing, files)


def _own_score(line: Line, results: Mapping[str, TaskScore]) -> LineScore:
    file = results.get(line.task)
    if file is None:
        return LineScore(None, (line.task,), ())
    known = file.finite_scores
    missing = tuple("/".join(place) for place in line.places if place not in known)
    if missing or not line.places:
        return LineScore(None, missing or (line.task,), (file,))
    scores = [known[place] for place in line.places]
    return LineScore(math.fsum(scores) / len(scores), (), (file,))


def compare(
    benchmark: str, lines: Sequence[Line], columns: Sequence[Column], baseline: str | None
) -> ModelComparison:
    """Compare models on the tasks of a benchmark.

    Args:
        baseline: label or name of a model; None: the first published model, else the first of
            several models that is no row of BM25, hybrid search or reranking.

    Raises:
        ConfigError: the baseline is none of the models.
    """
    if baseline is None:
        models = [column for column in columns if not is_beside(column.name)]
        first = [column for column in columns if column.published] or models or list(columns)
        chosen = first[0].label if len(columns) > 1 else None
        return ModelComparison(benchmark, tuple(lines), tuple(columns), chosen)
    for column in columns:
        if baseline in (column.label, column.name):
            return ModelComparison(benchmark, tuple(lines), tuple(columns), column.label)
    names = {name for column in columns for name in (column.label, column.name)}
    raise ConfigError(
        f"--baseline: {baseline!r} is not among the compared models; {nearest(baseline, names)}"
    )


def _origin(model: StoredModel, found: LineScore) -> Origin:
    dates = [file.date for file in found.files if file.date is not None]
    return Origin(
        source=f"revision {model.revision}",
        dataset_revisions=tuple(sorted({file.dataset_revision for file in found.files})),
        mteb_versions=tuple(sorted({f.mteb_version for f in found.files if f.mteb_version})),
        date=max(dates).isoformat(timespec="seconds") if dates else "",
        files=found.files,
    )


def _notes(label: str, lines: Sequence[Line], taken: Mapping[str, LineScore]) -> tuple[str, ...]:
    """Write notes on incomplete scores and on scores from data revisions other than mteb's."""
    notes = []
    other = [line.name for line in lines if _other_data(line, taken[line.name])]
    if other:
        notes.append(f"{label}: scored on other revisions of the data than mteb's: {_few(other)}.")
    begun = [name for name, found in taken.items() if found.score is None and found.files]
    if begun:
        lacking = _few(taken[begun[0]].missing)
        notes.append(f"{label}: begun, not complete: {_few(begun)}; {begun[0]} lacks {lacking}.")
    return tuple(notes)


def _other_data(line: Line, found: LineScore) -> bool:
    wanted = {one.task: one.dataset_revision for one in (line, *line.parts)}
    return found.score is not None and any(
        wanted.get(file.task) and file.dataset_revision != wanted[file.task] for file in found.files
    )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
