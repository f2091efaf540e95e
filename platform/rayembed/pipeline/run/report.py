"""Print the report of a finished run."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from rayembed.assets.storage import is_remote
from rayembed.config.run import Run
from rayembed.display.tables import MISSING, Table, console
from rayembed.evaluation.score import ModelScores, gain
from rayembed.evaluation.tables import UNTRAINED, ScoreKey, ScoreTable, run_table, score_table
from rayembed.pipeline.evaluate.findings import Finding, print_findings
from rayembed.pipeline.evaluate.guard import Verdict, own_tasks
from rayembed.pipeline.register.registration import RegisteredVersion
from rayembed.registry.card_parts import how_to_score
from rayembed.registry.metrics_log import METRICS_FILE
from rayembed.results.costs import cost_columns, total

T = TypeVar("T")

MLFLOW_AWAY = (
    "MLflow     cannot be reached; when it is back, run the same command with --send-metrics "
    "to send the rest"
)
"""Last line of the driver where MLflow has not got everything."""

TAKE_ANOTHER = (
    "Another share without training again: the same command with --set evaluation.guard.take=0.5 "
    "(1: the trained model), in Python trained.take(0.5)"
)
"""What to do where the guard's trade is not the one that is wanted."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run: its folders, scores, registered version and warnings."""

    run: Run
    scores: Mapping[ScoreKey, ModelScores]
    """Scores of the run's models and of baselines; empty if the run has no evaluation."""
    model_folder: str
    """Folder of the model in storage, as `run_folder`: a path or an address of object storage."""
    run_folder: str
    version: RegisteredVersion
    tracking_uri: str
    dropped_steps: int
    """Number of steps, over all stages, that changed no weights."""
    data_warnings: tuple[str, ...] = ()
    """Warnings about settings that the data cannot satisfy."""
    rejected: tuple[str, ...] = ()
    """Data sets with rejected rows, with their share and the location of examples."""
    held_out: tuple[str, ...] = ()
    """Held-out parts, with the number of texts and their location."""
    verdict: Verdict | None = None
    """Decision of the guard; None if the run has none."""
    findings: tuple[Finding, ...] = ()
    """What the run's findings say about its scores."""

    @property
    def trained(self) -> ModelScores | None:
        """Scores of the last stage's model, even if the guard kept another one; None without an
        evaluation.
        """
        return self.scores.get(ScoreKey(self.run.stages[-1].name))

    @cached_property
    def table(self) -> ScoreTable | None:
        """Table of scores with names for readers; None without an evaluation."""
        return scores_table(self.run, self.scores) if self.scores else None


def scores_table(run: Run, scores: Mapping[ScoreKey, ModelScores]) -> ScoreTable:
    """Make the table of scores of a run's models, with names for readers."""
    by_model = {key: scored.scores for key, scored in scores.items()}
    stages = [stage.name for stage in run.stages]
    table = run_table(by_model, stages, own_tasks(run))
    base = scores.get(UNTRAINED)
    if base is None:
        return table
    names = {task: [task] for task in table.tasks} | table.kinds
    noise = {
        (key.label(stages), name)
        for key, scored in scores.items()
        if key != UNTRAINED
        for name, tasks in names.items()
        if all(task in scored.scores and task in base.scores for task in tasks)
        and gain(scored, base, tasks).is_noise
    }
    return replace(table, noise=noise)


def without_hybrids_of_others(scores: Mapping[ScoreKey, T], kept: ScoreKey) -> dict[ScoreKey, T]:
    """Leave out the score table's rows for hybrid search with mixtures that are not kept."""
    return {
        key: scored
        for key, scored in scores.items()
        if not (key.beside and key.share is not None) or replace(key, beside="") == kept
    }


def gains_table(run: Run, scores: Mapping[ScoreKey, ModelScores]) -> Table:
    """Make a table with each model's mean difference from its base, the interval, and the cost of
    its vectors.

    Models of the run are compared with the untrained one, hybrid search with its model, baselines
    with the last stage's model, over the tasks that both have.
    """
    stages = [stage.name for stage in run.stages]
    last = ScoreKey(stages[-1])
    costs = cost_columns([total(scored.costs) for scored in scores.values()])
    rows: list[list[object]] = []
    for number, (key, scored) in enumerate(scores.items()):
        base = last if key.baseline is not None else UNTRAINED
        base = replace(key, beside="") if key.beside else base
        difference = MISSING
        if key != base and base in scores:
            tasks = [task for task in scored.scores if task in scores[base].scores]
            if tasks:
                difference = str(gain(scored, scores[base], tasks))
                if len(tasks) < len(scores[base].scores):
                    difference += f", {len(tasks)} of {len(scores[base].scores)} tasks"
        against = base.label(stages) if difference != MISSING else ""
        texts = [column[number] or MISSING for column in costs.values()]
        rows.append([key.label(stages), against, difference, *texts])
    heads = ["Model", "Less", "Mean difference", *costs]
    return Table(heads, rows, title="Differences and costs", align="lllr")


def print_outcome(outcome: Outcome, *, mlflow_complete: bool) -> None:
    """Print the score table, the model's location, and the command to run next."""
    out = console(soft_wrap=True)
    if outcome.table is not None:
        out.print(score_table(outcome.table, title="Held-out scores", with_mean=True))
        out.print(gains_table(outcome.run, outcome.scores))
    for line in outcome.held_out:
        out.print(f"Held out   {line}")
    print_findings(outcome.findings)
    verdict = outcome.verdict
    if verdict is not None:
        out.print(verdict.table([stage.name for stage in outcome.run.stages]))
    if outcome.dropped_steps:
        out.print(dropped_line(outcome.dropped_steps))
    out.print(f"Model      {outcome.model_folder}")
    out.print(f"           {_how_to_load(outcome)}")
    if choices := outcome.run.query_choices:
        out.print(
            "           queries were trained with different instructions and get none by default; "
            f"name one, prompt_name={' or '.join(map(repr, choices))}"
        )
    version = outcome.version
    out.print(f"Registry   {version.name} version {version.version} ({version.alias_uri})")
    if why := _why_no_candidate(outcome):
        out.print(f"           {why}")
    further = "" if outcome.table is None else ", scores.png; table: scores.md"
    out.print(f"Plots      {outcome.run_folder}/loss.png{further}")
    for line in outcome.rejected:
        out.print(f"Rejected   {line}")
    for warning in outcome.data_warnings:
        out.print(f"Data       {warning}")
    if not mlflow_complete:
        out.print(MLFLOW_AWAY)
    if outcome.tracking_uri.startswith("http"):
        out.print(f"MLflow     {outcome.tracking_uri}")
    else:
        out.print(f"MLflow     mlflow ui --backend-store-uri {shlex.quote(outcome.tracking_uri)}")
    if verdict is not None:  # last, where it is seen
        out.print(f"Guard      {verdict.summary}. {TAKE_ANOTHER}")


def _why_no_candidate(outcome: Outcome) -> str | None:
    """Explain why the registered version did not get the alias `candidate`; None if it did."""
    version, placement = outcome.version, outcome.run.placement
    if outcome.verdict is not None and outcome.verdict.kept == UNTRAINED:
        return "the start, no candidate: the guard found no better model"
    if version.alias_uri != version.uri:
        return None
    how = how_to_score(
        version.uri, storage=placement.storage_path, tracking_uri=placement.tracking_uri
    )
    return f"without scores, so no candidate; {how}"


def dropped_line(steps: int) -> str:
    """Write the report's sentence about training steps that were dropped because a loss or gradient
    was not finite.
    """
    were = "step was" if steps == 1 else "steps were"
    return (
        f"Dropped    {steps} {were} without effect: loss or gradient were not finite "
        f"({METRICS_FILE} says which)"
    )


def _how_to_load(outcome: Outcome) -> str:
    """Line of Python code that loads the model."""
    loader = "SentenceTransformer"
    if not outcome.run.model.has_plain_format:
        loader = "rayembed.models.sentence_module.as_sentence_transformer"
    if is_remote(outcome.model_folder):
        # From rayembed.assets.resolver: sentence-transformers reads no object storage.
        return f"{loader}(str(resolve_model({outcome.model_folder!r})))"
    return f"{loader}({outcome.model_folder!r})"
