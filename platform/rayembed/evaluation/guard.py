"""Which of a trained model, its base and their mixtures is kept, and how sure its gain is."""

from collections.abc import Collection, Mapping, Sequence
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

    @property
    def is_sure(self) -> bool:
        """Whether chance alone would hardly give so much, either way."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    def __str__(self) -> str:
        """`+0.034 (95 %: +0.021 to +0.047)`."""
        if self.interval is None:
            return f"{self.mean:+.3f}"
        low, high = self.interval
        return f"{self.mean:+.3f} (95 %: {low:+.3f} to {high:+.3f}{self.drawn})"


@dataclass(frozen=True)
class Judged:
    """A model beside its base, on own and on general tasks."""

    key: ScoreKey
    own: Gain
    general: Gain
    lost: Mapping[str, float]
    """General task → score less that of the base, where it is lower by more than `most_loss`; the
    greatest loss first."""

    def in_general(self, named: int | None = None) -> str:
        """The general gain, and what the mean of tasks hides: `+0.009; but Topics -0.034`, or
        `-0.009; of these Topics -0.034`.

        Args:
            named: of the tasks that lose; None: all of them.
        """
        worst = [f"{task} {apart:+.3f}" for task, apart in self.lost.items()]
        shown = worst[:named]
        if len(shown) < len(worst):
            shown.append(f"{len(worst) - len(shown)} more")
        link = "but" if self.general.mean > 0 else "of these"
        return f"{self.general}; {link} {', '.join(shown)}" if worst else str(self.general)


@dataclass(frozen=True)
class Verdict:
    """What the guard found."""

    judged: tuple[Judged, ...]
    """The trained model, then mixtures."""
    kept: ScoreKey
    """Model that is kept; `UNTRAINED`: none is better than the base."""
    most_loss: float

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        if self.kept == UNTRAINED:
            trained = self.judged[0]
            return (
                f"training gives no better model than its base: own data {trained.own}, general "
                f"tasks {trained.in_general(_NAMED)}; nor does a mixture gain on own data and lose "
                f"at most {self.most_loss:g} in general. Use the base, or train with more pairs, "
                "fewer steps or a lower rate"
            )
        (found,) = (one for one in self.judged if one.key == self.kept)
        share = "" if found.key.share is None else f"the mixture with {found.key.share:.0%} of "
        told = found.own.interval is None or found.own.is_sure
        unsure = "" if told else "; so small a gain on own data may be chance"
        kept = f"{share}the trained model is kept"
        return f"{kept}: own data {found.own}, general tasks {found.in_general(_NAMED)}{unsure}"

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
    """The model to keep: the highest mean on own tasks among those that gain there at all and
    lose no more than `most_loss` on the mean of the others; the first of equals, the trained one
    first. Which single tasks lose more decides nothing and is told.

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
            gain(models[key], base, general),
            _lost(models[key], base, general, guard.most_loss),
        )
        for key in (trained, *mixtures)
    )
    fit = [one for one in judged if one.own.mean > 0 and one.general.mean >= -guard.most_loss]
    kept = max(fit, key=lambda one: one.own.mean).key if fit else UNTRAINED
    return Verdict(judged, kept, guard.most_loss)


def _lost(model: Scored, base: Scored, tasks: Sequence[str], most: float) -> dict[str, float]:
    """Task → score less the base's, of several tasks that lose more than `most`, the worst first:
    what a single one loses is the mean.
    """
    if len(tasks) == 1:
        return {}
    most += _ROUNDING
    apart = {task: model.scores[task] - base.scores[task] for task in tasks}
    return {
        task: apart[task] for task in sorted(apart, key=apart.__getitem__) if apart[task] < -most
    }


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
