"""Candidates of a merge, scored beside the models that they are made of; the best one is kept."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rayembed.assets.storage import write_atomic
from rayembed.config.evaluation_run import EvaluationRun
from rayembed.config.scores import Scores
from rayembed.config.settings import parse
from rayembed.models.export import check_target
from rayembed.models.merge import Method, check_shares
from rayembed.pipeline.checkpoint_models import models_of
from rayembed.pipeline.evaluate import evaluate
from rayembed.pipeline.merge import MERGE_FILE, merge_models
from rayembed.pipeline.storage import placed
from rayembed.progress import doing
from rayembed.tables import Table, console, show

TABLE_FILE = "merge.md"
"""Scores of candidates and models, in the folder of the merged model."""


@dataclass(frozen=True)
class Scored:
    """A model or a candidate with its scores."""

    label: str
    scores: Mapping[str, float]
    """Main score by task."""
    shares: tuple[float, ...] | None = None
    """None: one of the models."""

    @property
    def mean(self) -> float:
        """Mean of the tasks' scores."""
        return fmean(self.scores.values())


@dataclass(frozen=True)
class Choice:
    """What was scored, and the candidate that is kept."""

    scored: tuple[Scored, ...]
    """The models in their order, then the candidates."""
    kept: Scored

    @property
    def table(self) -> Table:
        """Scores, a row for each model and candidate."""
        tasks = list(self.kept.scores)
        rows = [
            [
                one.label,
                *(f"{one.scores[task]:.4f}" for task in tasks),
                f"{one.mean:.4f}",
                "kept" if one is self.kept else "",
            ]
            for one in self.scored
        ]
        return Table(["model", *tasks, "mean", ""], rows, title="Candidates of the merge")


def choose(
    references: Sequence[str],
    output: Path,
    *,
    method: Method,
    candidates: Sequence[tuple[float, ...] | None],
    scores: Scores,
    storage: str,
) -> Choice:
    """Save the candidate with the highest mean score in `output`, with all scores beside it; of
    equal ones the first.

    One candidate is on disk at a time; what is scored already is not scored again.

    Args:
        candidates: shares of each, see `rayembed.models.merge.check_shares`.
        storage: where scores are kept.

    Raises:
        RayembedError: as `merge_models`, or a task cannot be scored.
    """
    wanted = [check_shares(method, len(references), shares) for shares in candidates]
    check_target(output)
    references = models_of(references)
    found = []
    output.parent.mkdir(parents=True, exist_ok=True)
    for shares in dict.fromkeys(wanted):
        label = f"{method} {', '.join(f'{share:g}' for share in shares)}"
        with tempfile.TemporaryDirectory(prefix=".candidate-", dir=output.parent) as folder:
            place = Path(folder) / output.name
            with doing(f"merging, {label}"):
                merge_models(references, place, method=method, shares=shares)
            found.append(Scored(label, _scores(str(place), label, scores, storage), shares))
    # After the candidates, so that models which do not fit each other are told before any score.
    models = [
        Scored(f"model {number}", _scores(one, one, scores, storage))
        for number, one in enumerate(references, 1)
    ]
    kept = max(found, key=lambda one: one.mean)
    choice = Choice((*models, *found), kept)
    merge_models(references, output, method=method, shares=kept.shares)
    told: dict[str, Any] = json.loads((output / MERGE_FILE).read_text())
    told["scores"] = {one.label: {**one.scores, "mean": one.mean} for one in choice.scored}
    write_atomic(output / MERGE_FILE, (json.dumps(told, indent=2) + "\n").encode())
    write_atomic(output / TABLE_FILE, show(choice.table, "markdown").encode())
    return choice


def print_choice(choice: Choice, references: Sequence[str], output: Path, out: TextIO) -> None:
    """Print the table, what is kept, and a model that is better than every candidate."""
    console(out).print(choice.table)
    for number, reference in enumerate(references, 1):
        out.write(f"model {number}:      {reference}\n")
    best = max(choice.scored, key=lambda one: one.mean)
    out.write(f"Merged model: {output} ({choice.kept.label}, mean {choice.kept.mean:.4f})\n")
    if best.mean > choice.kept.mean:
        out.write(f"Better:       {best.label} ({best.mean:.4f}), which is no mixture; take it\n")


def _scores(reference: str, label: str, scores: Scores, storage: str) -> dict[str, float]:
    """Main score by task, by the one road; raises what a task raised."""
    settings = {name: getattr(scores, name) for name in Scores.model_fields}
    named = {"model": {"reference": reference}, "placement": {"storage_path": storage}}
    run = parse(EvaluationRun, {**named, **settings})
    with doing(f"scoring {label}"):
        evaluated = evaluate(placed(run))
    for _, error in evaluated.failed:
        raise error
    return dict(evaluated.scored.scores)
