"""Which of a trained model, its base and their mixtures is kept, and how sure its gain is.

The base is the model before training, the start.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import numpy as np

from rayembed.config.guard import GuardConfig
from rayembed.evaluation.jobs import OF_QUERIES
from rayembed.evaluation.score import ModelScores
from rayembed.evaluation.tables import UNTRAINED, ScoreKey
from rayembed.tables import Table

_DRAWS = 2_000
_LIKELY = (2.5, 97.5)
"""Percentiles of a 95 % interval."""
_ROUNDING = 1e-9
"""Error of a float that a difference of scores, which have five decimals, may have."""
_NAMED = 3
"""Losing tasks that a verdict names at most."""
_NOTED = 0.003
"""Loss of a single general task above which the verdict names it."""
_MOST_LOSS = 0.03
"""General loss from which on no gain on own data makes up for it."""
_LEAST_GAIN = 0.001
"""Own gain from which on a model counts as better where no task has scores of queries, so that
nothing says what chance does: what a table of points shows."""
_LEAST_OF_BEST = 0.8
"""Share of the best own gain below which no smaller loss makes up for the rest: with few queries
half the gain may be within noise."""

Queries = Mapping[str, Sequence[Sequence[float]]]
"""Task → score of each query of each of its subsets, in an order that all models share."""


@dataclass(frozen=True)
class Scored:
    """A model's scores for the guard."""

    scores: Mapping[str, float]
    """Main score by task."""
    queries: Queries
    """Scores of single queries, of those tasks that have such."""


@dataclass(frozen=True)
class Gain:
    """A mean score less that of the base."""

    mean: float
    interval: tuple[float, float] | None
    """95 % interval over draws of queries; None where no task has any."""
    drawn: str = ""
    """Which tasks queries were drawn of, where not of all."""

    def __str__(self) -> str:
        """`+0.034 (95 %: +0.021 to +0.047)`."""
        if self.interval is None:
            return f"{self.mean:+.3f}"
        low, high = self.interval
        return f"{self.mean:+.3f} (95 %: {low:+.3f} to {high:+.3f}{self.drawn})"


@dataclass(frozen=True)
class Judged:
    """A candidate beside the base, on own and on general tasks."""

    key: ScoreKey
    own: Gain
    general: Gain | None
    """None: the run has no general tasks."""
    lost: Mapping[str, float]
    """General task → score less that of the base, where it is lower by more than `_NOTED`; the
    greatest loss first."""

    @property
    def loss(self) -> float:
        """By how much the mean of general tasks is lower than the base's; 0 where it is not."""
        return 0.0 if self.general is None or self.general.mean > 0 else -self.general.mean

    @property
    def gains(self) -> bool:
        """Whether own data gain beyond chance; without scores of queries, by at least 0.001."""
        if self.own.interval is None:
            return self.own.mean >= _LEAST_GAIN - _ROUNDING
        return self.own.mean > _ROUNDING and self.own.interval[0] > _ROUNDING

    def is_affordable(self, most_loss: float | None) -> bool:
        """Whether the general loss is within the budget; without one, smaller than the own gain
        and than 0.03.
        """
        if most_loss is not None:
            return self.loss <= most_loss + _ROUNDING
        return self.loss < min(self.own.mean, _MOST_LOSS) - _ROUNDING

    @property
    def name(self) -> str:
        """`trained`, or the share of it in a mixture: `75 %`."""
        return "trained" if self.key.share is None else f"{100 * self.key.share:g} %"

    def in_general(self) -> str:
        """The general gain, and what the mean of tasks hides: `+0.009; but Topics -0.034`, or
        `-0.009; of these Topics -0.034`.
        """
        if self.general is None:
            return "none"
        worst = ", ".join(f"{task} {apart:+.3f}" for task, apart in self.lost.items())
        link = "but" if self.general.mean > 0 else "of these"
        return f"{self.general}; {link} {worst}" if worst else str(self.general)


@dataclass(frozen=True)
class Verdict:
    """What the guard found."""

    judged: tuple[Judged, ...]
    """The trained model, then mixtures."""
    kept: ScoreKey
    """Model that is kept; `UNTRAINED`: none is better than the base."""
    note: str = ""
    """What a reader of the general gains should know; empty: nothing."""

    @property
    def summary(self) -> str:
        """The trade in points of 100, and what it hides.

        `trained: own +5.1, general -1.0; 75 %: +5.2, -0.7 ← kept; 50 %: +3.9, -0.4`.
        """
        shown = [self._trade(number, one) for number, one in enumerate(self.judged)]
        note = f" ({self.note})" if self.note else ""
        if self.kept == UNTRAINED:
            return (
                f"{'; '.join(shown)}; start ← kept: no candidate gains on own data beyond chance "
                "at a small enough loss in general. Use the start, or train with more pairs, fewer "
                f"steps or a lower rate{note}"
            )
        (found,) = (one for one in self.judged if one.key == self.kept)
        worst = [f"{task} {100 * apart:+.1f}" for task, apart in found.lost.items()]
        named = worst[:_NAMED]
        if len(named) < len(worst):
            named.append(f"{len(worst) - len(named)} more")
        lost = f" ({found.name} loses most on {', '.join(named)})" if worst else ""
        return "; ".join(shown) + lost + note

    def _trade(self, number: int, one: Judged) -> str:
        own, general = ("own ", "general ") if number == 0 else ("", "")
        elsewhere = "" if one.general is None else f", {general}{100 * one.general.mean:+.1f}"
        mark = " ← kept" if one.key == self.kept else ""
        return f"{one.name}: {own}{100 * one.own.mean:+.1f}{elsewhere}{mark}"

    def table(self, stages: Sequence[str]) -> Table:
        """Gains on the base, a row for each model."""
        rows = [
            [
                one.key.label(stages),
                str(one.own),
                one.in_general(),
                "kept" if one.key == self.kept else "",
            ]
            for one in self.judged
        ]
        heads = ["model", "own data", "general tasks", ""]
        return Table(heads, rows, title="Gains on the untrained model, mean over tasks")


def scored_by(scored: ModelScores) -> Scored:
    """What the guard takes of a model's scores."""
    queries: dict[str, list[Sequence[float]]] = {}
    for task in scored.tasks:
        rows = [] if task.result is None else list(chain(*task.result.scores.values()))
        if rows and all(OF_QUERIES in row for row in rows):
            ordered = sorted(rows, key=lambda row: str(row["hf_subset"]))
            queries[task.name] = [row[OF_QUERIES] for row in ordered]
    return Scored(scored.scores, queries)


def verdict(
    models: Mapping[ScoreKey, Scored], trained: ScoreKey, own: Collection[str], guard: GuardConfig
) -> Verdict:
    """The model to keep, by `choice`, or the share that the guard is to take.

    Args:
        models: the untrained model, the trained one and mixtures, all scored on the same tasks.
        own: names of the own tasks; all others are general.
    """
    base = models[UNTRAINED]
    mine = [task for task in base.scores if task in own]
    general = [task for task in base.scores if task not in own]
    mixtures = [key for key in models if key.share is not None and key.stage == trained.stage]
    judged = tuple(
        Judged(
            key,
            gain(models[key], base, mine),
            gain(models[key], base, general) if general else None,
            _lost(models[key], base, general),
        )
        for key in (trained, *mixtures)
    )

    def near(one: Judged, other: Judged) -> bool:
        apart = gain(models[one.key], models[other.key], mine).interval
        return apart is not None and apart[0] <= _ROUNDING

    if guard.take is not None:
        share = guard.take if guard.take < 1 else None
        return Verdict(judged, ScoreKey(trained.stage, share=share))
    kept = choice(judged, near, guard.most_loss)
    return Verdict(judged, UNTRAINED if kept is None else kept.key)


def choice(
    candidates: Sequence[Judged], near: Callable[[Judged, Judged], bool], most_loss: float | None
) -> Judged | None:
    """The candidate that is kept; None: the base is.

    Left are those that gain on own data beyond chance (without scores of queries: by at least
    0.001) and whose general loss is smaller than that
    gain and than 0.03, or with `most_loss` at most that. Of these the highest own gain is the best.
    Of the best and all that queries do not tell from it and that have at least 0.8 of its gain, the
    smallest general loss is kept; of equal losses the highest own gain, of equal gains the first.

    Args:
        candidates: in an order that decides between equal ones.
        near: whether queries do not tell a candidate from another one with a lower own gain.
    """
    left = [one for one in candidates if one.gains and one.is_affordable(most_loss)]
    if not left:
        return None
    best = _first_highest(left)
    enough = _LEAST_OF_BEST * best.own.mean - _ROUNDING
    left = [one for one in left if one is best or (one.own.mean >= enough and near(best, one))]
    least = min(one.loss for one in left)
    return _first_highest([one for one in left if one.loss <= least + _ROUNDING])


def _first_highest(candidates: Sequence[Judged]) -> Judged:
    """The first of those with the highest own gain."""
    highest = max(one.own.mean for one in candidates)
    return next(one for one in candidates if one.own.mean >= highest - _ROUNDING)


def _lost(model: Scored, base: Scored, tasks: Sequence[str]) -> dict[str, float]:
    """Task → score less the base's, of several tasks that lose more than `_NOTED`, the worst first:
    what a single one loses is the mean.
    """
    if len(tasks) == 1:
        return {}
    apart = {task: model.scores[task] - base.scores[task] for task in tasks}
    lost = [task for task in tasks if apart[task] < -(_NOTED + _ROUNDING)]
    return {task: apart[task] for task in sorted(lost, key=apart.__getitem__)}


def gain(model: Scored, base: Scored, tasks: Sequence[str]) -> Gain:
    """Mean over tasks of a model's score less the base's, with a bootstrap's interval.

    Both models answer the same queries, so these are drawn in pairs, with replacement and within
    each subset of a task (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).
    Tasks without scores of queries stay as they are in all draws.
    """
    mean = fmean(model.scores[task] - base.scores[task] for task in tasks)
    drawn = [task for task in tasks if task in model.queries and task in base.queries]
    if not drawn:
        return Gain(mean, None)
    told = f", queries of {len(drawn)} of {len(tasks)} tasks" if len(drawn) < len(tasks) else ""
    generator = np.random.default_rng(0)
    rest = sum(model.scores[task] - base.scores[task] for task in tasks if task not in drawn)
    draws = np.full(_DRAWS, float(rest))
    for task in drawn:
        parts = list(zip(model.queries[task], base.queries[task], strict=True))
        for mine, other in parts:
            apart = np.asarray(mine) - np.asarray(other)
            # How often a draw has each difference, of which there are few.
            values, counts = np.unique(apart, return_counts=True)
            numbers = generator.multinomial(len(apart), counts / len(apart), size=_DRAWS)
            draws += numbers @ values / len(apart) / len(parts)
    low, high = np.percentile(draws / len(tasks), _LIKELY)
    return Gain(mean, (float(low), float(high)), told)
