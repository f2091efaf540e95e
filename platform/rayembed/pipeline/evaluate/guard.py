"""Guard of a run: keep the trained model, its base or a mixture of both, by scores with confidence
intervals.

The base is the model before training, the start.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import join, list_files, read_bytes, remove_folder
from rayembed.config.held_out import held_out_set
from rayembed.config.run import Run
from rayembed.config.run_evaluation import GuardConfig, own_sets_of
from rayembed.display.progress import doing
from rayembed.display.tables import Table
from rayembed.evaluation.score import ModelScores, gain
from rayembed.evaluation.tables import AVERAGED, MERGED, UNTRAINED, ScoreKey
from rayembed.models.saving.export import read_compression, write_compression
from rayembed.models.saving.merge import Method, merge_models
from rayembed.pipeline.evaluate.last_checkpoints import can_average, save_mean
from rayembed.pipeline.evaluate.run_scorer import RunScorer
from rayembed.pipeline.evaluate.variants import ROUNDING, Variant, choose, score_all, variants_table
from rayembed.pipeline.run.folders import RunFolders
from rayembed.pipeline.run.runtime import Runtime
from rayembed.registry.model_card import CARD_FILE
from rayembed.results.intervals import PairedDifference
from rayembed.training.checkpoints.export import MADE_OF_FILE, upload_model

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

_FEW_QUERIES = 200
"""Own queries below which the verdict says that they are few: of 200, a paired bootstrap sees a
true gain of two points in every third or second case (docs/baselines.md)."""


@dataclass(frozen=True)
class Judged:
    """Comparison of one candidate with the base, on own and on general tasks."""

    key: ScoreKey
    own: PairedDifference
    general: PairedDifference | None
    """Gain on general tasks; None if the run has none."""
    lost: Mapping[str, float]
    """Score difference by general task, for tasks that lose more than `_NOTED`; the greatest loss
    first."""

    @property
    def loss(self) -> float:
        """How far the mean general score falls below the base's; 0 if it does not fall."""
        return 0.0 if self.general is None or self.general.mean > 0 else -self.general.mean

    @property
    def gains(self) -> bool:
        """Whether the gain on own data is significant; without scores of single queries, whether it
        is at least 0.001.
        """
        if self.own.interval is None:
            return self.own.mean >= _LEAST_GAIN - ROUNDING
        return self.own.mean > ROUNDING and self.own.interval[0] > ROUNDING

    def is_affordable(self, most_loss: float | None) -> bool:
        """Whether the general loss is at most `most_loss`; if that is None, below the own gain and
        below 0.03.
        """
        if most_loss is not None:
            return self.loss <= most_loss + ROUNDING
        return self.loss < min(self.own.mean, _MOST_LOSS) - ROUNDING

    @property
    def name(self) -> str:
        """Name for readers: `trained`, or the share of the trained model in a mixture, `75 %`."""
        if self.key.share is None:
            return "trained"
        return "checkpoints" if self.key.share == AVERAGED else f"{100 * self.key.share:g} %"

    def in_general(self) -> str:
        """Format the general gain, followed by the tasks that lose most: `+0.009; but Topics
        -0.034`.
        """
        if self.general is None:
            return "none"
        worst = ", ".join(f"{task} {apart:+.3f}" for task, apart in self.lost.items())
        link = "but" if self.general.mean > 0 else "of these"
        return f"{self.general}; {link} {worst}" if worst else str(self.general)


@dataclass(frozen=True)
class Verdict:
    """Decision of the guard: all compared candidates, and the model to keep."""

    judged: tuple[Judged, ...]
    """The trained model, then mixtures."""
    kept: ScoreKey
    """Chosen model; `UNTRAINED` if no candidate is better than the base."""
    note: str = ""
    """Remark on the gains for readers; may be empty."""

    @property
    def summary(self) -> str:
        """Describe each candidate's gains in hundredths of a score, the kept model, and the tasks
        that lose.

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
        """Table of the gains over the base, with a row for each candidate."""
        rows = [
            (one.key.label(stages), {"own data": one.own, "general tasks": one.in_general()})
            for one in self.judged
        ]
        kept = [one.key == self.kept for one in self.judged]
        return variants_table("Gains on the untrained model, mean over tasks", rows, kept)


def verdict(
    models: Mapping[ScoreKey, ModelScores],
    trained: ScoreKey,
    own: Collection[str],
    guard: GuardConfig,
) -> Verdict:
    """Compare the candidates with the base and choose the model to keep: by the rule `choice`, or
    the mixture that `guard.take` sets.

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
        return apart is not None and apart[0] <= ROUNDING

    if guard.take is not None:
        share = guard.take if guard.take < 1 else None
        return Verdict(judged, ScoreKey(trained.stage, share=share))
    kept = choice(judged, near, guard.most_loss)
    return Verdict(judged, UNTRAINED if kept is None else kept.key)


def choice(
    candidates: Sequence[Judged], near: Callable[[Judged, Judged], bool], most_loss: float | None
) -> Judged | None:
    """Choose the candidate to keep; None means that the base model is kept.

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

    def is_near(best: Judged, one: Judged) -> bool:
        enough = _LEAST_OF_BEST * best.own.mean - ROUNDING
        return one.own.mean >= enough and near(best, one)

    return choose(left, lambda one: one.own.mean, near=is_near, cost=lambda one: one.loss)


def _lost(model: ModelScores, base: ModelScores, tasks: Sequence[str]) -> dict[str, float]:
    """Map general tasks that lose more than `_NOTED` to their difference from the base, largest
    loss first; empty for a single task.
    """
    if len(tasks) == 1:
        return {}
    apart = {task: model.scores[task] - base.scores[task] for task in tasks}
    lost = [task for task in tasks if apart[task] < -(_NOTED + ROUNDING)]
    return {task: apart[task] for task in sorted(lost, key=apart.__getitem__)}


def mixtures(
    run: Run, folders: RunFolders, scorer: RunScorer, runtime: Runtime
) -> dict[ScoreKey, ModelScores]:
    """Make and score the weight mixtures of the last stage's model and the untrained model; empty
    without a guard. The mean of the stage's last checkpoints is one of them, if it is set.

    Raises:
        RayembedError: the models do not fit each other, or a mixture cannot be saved or scored.
    """
    guard, last = run.evaluation.guard, run.stages[-1].name
    if guard is None:
        return {}

    def average(key: ScoreKey) -> ScoreKey:
        mean = partial(save_mean, guard.last_checkpoints or 0)
        with doing(f"averaging the last checkpoints of {last}"):
            runtime.export(mean, run, folders.stage(last), folders.model(key.model))
        return key

    def make(key: ScoreKey) -> ScoreKey:
        base = folders.model(UNTRAINED.model)
        mix = partial(save_mixture, base, guard.method, share_of(key), density=guard.density)
        with doing(f"merging, {key.share:.0%} of {last}"):
            runtime.export(mix, run, folders.model(last), folders.model(key.model))
        return key

    keys = [ScoreKey(last, share=share) for share in guard.mixed]
    variants = [Variant(key.model, partial(make, key)) for key in keys]
    if guard.averages and can_average(guard.last_checkpoints or 0, folders.stage(last)):
        key = ScoreKey(last, share=AVERAGED)
        variants.append(Variant(key.model, partial(average, key)))
    scored = score_all(variants, lambda _, key: scorer.score(key))
    return {one.made: one.result for one in scored if one.result is not None}


def remove_mixtures(run: Run, folders: RunFolders, kept: ScoreKey) -> None:
    """Remove the run's stored mixtures, except the chosen one and those chosen earlier, which have
    a model card.
    """
    place = join(folders.storage, "models")
    files = [Path(name) for name in list_files(place, recursive=True)]
    begin = f"{run.stages[-1].name}{MERGED}"
    made = {file.parts[0] for file in files if file.parts[0].startswith(begin)}
    carded = {file.parts[0] for file in files if file.parts[1:] == (CARD_FILE,)}
    for name in sorted(made - carded - {kept.model}):
        remove_folder(join(place, name))


def share_of(key: ScoreKey) -> float:
    """Share of the trained model in a model of a guarded run: 0 for the untrained model, 1 for the
    trained one.
    """
    if key.stage is None:
        return 0.0
    return 1.0 if key.share is None else key.share


def save_mixture(
    base: str,
    method: Method,
    share: float,
    run: Run,
    trained: str | None,
    folder: str,
    density: float | None = None,
) -> None:
    """Mix the weights of two models of the run and save the result in storage, unless it
    exists.

    Args:
        base, trained: folders of the models, in storage.
        method, share, density: how they are mixed, the share of the trained one, and the part of
            its changes that the method keeps.
    """
    assert trained is not None
    made_of = [read_bytes(join(place, MADE_OF_FILE)).decode() for place in (base, trained)]
    settings = {"mixture_of": made_of, "method": method, "share": share}
    if density is not None:
        settings["density"] = density
    note = json.dumps(settings, indent=1).encode()
    shares = (1 - share, share) if method == "linear" else (share,)

    def save(place: Path) -> None:
        merge_models([base, trained], place, method=method, shares=shares, density=density)
        # Both have the same zeros, so the mixture has them too.
        if run.model.keep_zeros and (told := read_compression(resolve_model(trained))):
            write_compression(place, told)

    upload_model(folder, note, save)


def judge(run: Run, scores: Mapping[ScoreKey, ModelScores], note: str = "") -> Verdict | None:
    """Compare a run's models and decide which one to keep; None without a guard.

    Args:
        note: what a reader of its gains should know.
    """
    guard = run.evaluation.guard
    if guard is None:
        return None
    models = {k: scored for k, scored in scores.items() if k == ScoreKey(k.stage, share=k.share)}
    trained = ScoreKey(run.stages[-1].name)
    own = own_tasks(run)
    few = _few_queries(scores[UNTRAINED], own)
    note = "; ".join(part for part in (few, note) if part)
    return replace(verdict(models, trained, own, guard), note=note)


def _few_queries(base: ModelScores, own: Collection[str]) -> str:
    """Write a remark if the own data has few queries or other items; empty if it has enough, or no
    outcomes of items.
    """
    parts = [part for task, parts in base.items.items() if task in own for part in parts]
    number = sum(map(len, parts))
    if not 0 < number < _FEW_QUERIES:
        return ""
    return f"own data has only {number} queries, too few to show small differences"


def own_tasks(run: Run) -> tuple[str, ...]:
    """Names of the tasks on the user's own data; all others are general."""
    held_out = (held_out_set(dataset.name) for dataset in run.held_out_datasets)
    return (*held_out, *own_sets_of(run.evaluation.guard or GuardConfig(), run.evaluation))
