"""Train a run's cross-encoder, and score it behind the embedder that mined its negatives."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TextIO

from rayembed.config.own_sets import RetrievalSet
from rayembed.config.run import Run
from rayembed.display.progress import enter, overview
from rayembed.display.tables import Cell, Table, console
from rayembed.errors import ConfigError
from rayembed.evaluation.plots import loss_curve
from rayembed.pipeline.run.dry_run import short_reference
from rayembed.pipeline.run.folders import RunFolders, plan_of
from rayembed.pipeline.run.held_out import held_out_sets
from rayembed.pipeline.run.report import MLFLOW_AWAY, dropped_line
from rayembed.pipeline.run.runtime import runtime_of
from rayembed.pipeline.run.train import claimed_run, phases, train_claimed
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog, dropped_steps
from rayembed.registry.tracking import Tracker
from rayembed.training.checkpoints.checkpoint_list import remove_states
from rayembed.training.trainer import Callback
from rayembed_extras.reranking.scores import RerankedScores, score_behind

_SCORES = "scores behind the embedder"
"""Phase of the progress overview."""


@dataclass(frozen=True)
class TrainedReranker:
    """Result of a training: where the reranker is, and its scores behind the embedder."""

    run: Run
    folder: str
    """Folder of the model in storage, which sentence-transformers loads as a CrossEncoder."""
    run_folder: str
    embedder: str | None
    """Model whose order is reranked; None: the run mines no negatives, so it names none."""
    scores: RerankedScores | None
    """Scores on the held-out parts; None without one, or without an embedder."""
    cut_share: float
    """Share of the training pairs that were longer than the model reads."""
    dropped_steps: int
    mlflow_complete: bool

    @property
    def gain(self) -> float | None:
        """Mean difference of nDCG@10 between the reranked order and the embedder's; None without
        scores.
        """
        return None if self.scores is None else self.scores.gain.mean


def train(run: Run, *, callbacks: Sequence[Callback] = ()) -> TrainedReranker:
    """Train or resume a run of a cross-encoder, and score it behind its embedder.

    Args:
        callbacks: further ones of the trainer of each stage, on every worker.

    Raises:
        ConfigError: the run's model is no reranker.
        RayembedError: what is wrong and what to do; the MLflow run is then marked as failed.
    """
    if run.model.embeds:
        raise ConfigError(
            f"the run {run.name!r} has model.kind {run.model.kind!r}, an embedding model; train it "
            "with rayembed train, or set model.kind=cross_encoder and a loss over lists"
        )
    for dataset in run.used_datasets:
        given = (dataset.query_instruction, dataset.document_instruction)
        if any(given) or dataset.source.instruction_column is not None:
            raise ConfigError(
                f"data.datasets.{dataset.name} has instructions, but a cross-encoder reads query "
                "and document as they are; leave query_instruction, document_instruction and "
                "source.instruction out"
            )
    with claimed_run(run, wait=False) as (claimed, folders):
        runtime = runtime_of(run.placement)
        with overview([*phases(run), _SCORES]):
            made, complete = train_claimed(claimed, folders, _finish, runtime, None, callbacks)
        remove_states(claimed, folders.storage)
        return replace(made, mlflow_complete=complete)


def _finish(
    run: Run,
    folders: RunFolders,
    tracker: Tracker,
    _: Mapping[Any, Any],
    __: Mapping[str, Any],
) -> TrainedReranker:
    """Draw the loss, score the last stage's model behind the embedder, and describe the result."""
    enter(_SCORES)
    records = MetricsLog(folders.local / METRICS_FILE).records()
    loss_curve(records, folders.local / "loss.png")
    tracker.log_artifact(folders.local / "loss.png")
    folder = folders.model(run.stages[-1].name)
    embedder = embedder_of(run)
    plans = {stage.name: plan_of(run, stage.name) for stage in run.stages}
    sets = [
        RetrievalSet(name=one.name, path=one.path, instruction=one.instruction or None)
        for one in held_out_sets(run, plans)
        if not one.pairs
    ]
    scores = None
    if embedder is not None and sets:
        scores = score_behind(embedder, folder, sets, run)
        for name, values in scores.by_row.items():
            tracker.log_scores(f"eval_{name}", values, run.total_steps)
    shares = [float(record["cut_share"]) for record in records if "cut_share" in record]
    return TrainedReranker(
        run=run,
        folder=folder,
        run_folder=folders.storage,
        embedder=embedder,
        scores=scores,
        cut_share=fmean(shares) if shares else 0.0,
        dropped_steps=dropped_steps(records),
        mlflow_complete=True,
    )


def embedder_of(run: Run) -> str | None:
    """Return the model that mines the negatives of the run's first mined data set; None if no data
    set is mined.
    """
    mined = (one.mining.teacher for one in run.used_datasets if one.mining is not None)
    return next(mined, None)


def print_trained(trained: TrainedReranker, out: TextIO | None = None) -> None:
    """Print the scores of the embedder's order and of the reranked one, the model's location, and
    what to run next.
    """
    printer = console(out, soft_wrap=True)
    scores = trained.scores
    if scores is not None:
        rows = [
            [label, Cell(scores.mean(row), digits=4), Cell(scores.mean_mrr(row), digits=4)]
            for row, label in scores.labels.items()
        ]
        title = f"Held-out documents ranked by {short_reference(str(trained.embedder))}"
        printer.print(Table(["Order", "nDCG@10", "MRR@10"], rows, title=title, align="lrr"))
        printer.print(f"Gain       {scores.gain} nDCG@10 over the embedder's own order")
    elif trained.embedder is None:
        printer.print("Scores     none: no data set is mined, so the run names no embedder")
    else:
        printer.print("Scores     none: no data set of the run has a held-out part")
    if trained.cut_share:
        length = trained.run.model.document_max_length
        printer.print(
            f"Cut        {trained.cut_share:.1%} of the training pairs are longer than {length} "
            "tokens; raise model.document_max_length to read them whole"
        )
    if trained.dropped_steps:
        printer.print(dropped_line(trained.dropped_steps))
    printer.print(f"Model      {trained.folder}")
    printer.print(f"           CrossEncoder({trained.folder!r})")
    if not trained.mlflow_complete:
        printer.print(MLFLOW_AWAY)
    embedder, folder = (
        shlex.quote(one or "EMBEDDER") for one in (trained.embedder, trained.folder)
    )
    printer.print(f"Next       rayembed serve --model {folder}")
    printer.print(
        f"           rayembed evaluate --model {embedder} --own-set FOLDER --reranker {folder}"
    )
