"""Fine-tuning on pairs from memory or files, up to a registered model."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.api.calls import (
    assignments_of,
    check_addresses,
    default_name,
    reference_of,
    shown,
)
from rayembed.api.embedder import Embedder, load
from rayembed.config.loss import LossConfig
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.data.given_rows import Rows, rows_file
from rayembed.errors import ConfigError, DataError
from rayembed.recipes.building_blocks import OWN_REJECTED_SHARE
from rayembed.recipes.catalogue import OWN_PAIRS, get_recipe

if TYPE_CHECKING:
    from rayembed.data.sources.rows import Row
    from rayembed.pipeline.run.report import Outcome
    from rayembed.training.trainer import Callback

logger = logging.getLogger(__name__)

_DATASET = "data.datasets.pairs"
_MOST_NEGATIVES = 7
"""Maximum number of negatives of a row used in training."""

_HELD_OUT = 10
"""Minimum number of held-out documents: fewer would say nothing of retrieval."""

_UNSCORED: Mapping[str, Any] = {
    f"{_DATASET}.held_out": None,
    "evaluation.guard": None,
    "evaluation.benchmarks": [],
}
"""Settings of runs whose rows are too few to hold any out for scores."""


@dataclass(frozen=True, repr=False)
class Trained:
    """Result of `train`: the kept model with its scores, settings and registered version."""

    outcome: "Outcome"

    @property
    def folder(self) -> str:
        """Folder of the kept model, which sentence-transformers loads too (docs/python.md)."""
        return self.outcome.model_folder

    @cached_property
    def model(self) -> Embedder:
        """The kept model, loaded at first use."""
        return load(self.folder)

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Map each scored model (untrained, stages, mixtures, baselines) to its main score by task;
        empty without an evaluation.
        """
        table = self.outcome.table
        return {} if table is None else {name: dict(row) for name, row in table.rows.items()}

    @property
    def verdict(self) -> str | None:
        """Describe the guard's decision: each candidate's gains on own and general tasks, in
        points, and the kept model; None without a guard.
        """
        verdict = self.outcome.verdict
        return None if verdict is None else verdict.summary

    def take(self, share: float) -> "Trained":
        """Keep and register the mixture with the given share of the trained model, without training
        again.

        Args:
            share: of the trained model in its mixture with the start, above 0; 1: the model itself.

        Raises:
            ConfigError: the run has no guard, or no such share.
            RayembedError: as `train`.
        """
        if self.run.evaluation.guard is None:
            raise ConfigError(
                "take() cannot be used: this run has evaluation.guard=null, so it kept the "
                "trained model and made no mixtures with the untrained model. To get "
                "mixtures, call train again with the same arguments and "
                "settings={'evaluation.guard': {}}"
            )
        return trained_by(override(self.run, [f"evaluation.guard.take={float(share)!r}"]))

    @property
    def run(self) -> Run:
        """All settings of the run; `run.to_yaml()` gives the text of a file for a job's
        `--recipe`.
        """
        return self.outcome.run

    @property
    def version(self) -> str:
        """Reference of the registered model, `models:/name/number`."""
        return self.outcome.version.uri

    def __repr__(self) -> str:
        return f"Trained({self.folder!r}, registered as {self.version!r})"

    def _repr_markdown_(self) -> str:
        from rayembed.display.tables import show
        from rayembed.evaluation.tables import score_table

        table = self.outcome.table
        told = "" if table is None else show(score_table(table, with_mean=True), "markdown")
        told += "" if self.verdict is None else f"\n\nGuard: {self.verdict}"
        return f"{told}\n\nModel `{self.folder}`, registered as `{self.version}`"


def train(
    model: str | Path,
    pairs: Rows,
    *,
    loss: LossConfig | str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    query_instruction: str | None = None,
    name: str | None = None,
    output: str | Path = "outputs",
    workers: int = 1,
    callbacks: "Sequence[Callback]" = (),
    settings: Mapping[str, Any] | None = None,
) -> Trained:
    """Fine-tune an encoder on pairs, score it before and after training, and register it.

    Mixtures of the two are scored too, on general tasks as well, and the one is kept that gains
    most on a held-out part of the pairs and loses less in general (docs/guard.md); `verdict`
    shows the trade, and `take` takes another share. Where none does, the start is kept, no
    version becomes `candidate`, and `verdict` says so. The run is the recipe for own pairs with
    what is given here. The same call goes on where a former one stopped, and does nothing twice.
    One worker trains in this process, several on Ray.

    Args:
        model: what to start from: a folder of transformers or sentence-transformers, an asset
            reference (`hf://org/name@revision`) or a short name (`all-MiniLM-L6-v2`).
        pairs: a path of files (JSONL, CSV, Parquet), a DataFrame, a `datasets.Dataset`, or a list
            of tuples (query, positive), (query, positive, negatives), (text, text, score) or of
            dicts. Columns are `query`, `positive` and, if there are any, `negatives`; others are
            named by `settings`, as in `{"data.datasets.pairs.source.query": "anchor"}`.
        loss: a loss of `rayembed.losses`, such as `InfoNCE(temperature=0.02)`, or the name of one
            with its own defaults, such as `"siglip"`; graded pairs have `CoSENT()` without any.
        steps: weight updates; None: by `epochs`.
        epochs: passes over the records that are left to train on, rounded to whole steps; one
            without `steps`.
        batch_size: pairs in a step, over all workers; None: 64, or fewer where rows are few.
        learning_rate: its highest; None: the recipe's.
        query_instruction: text before every query, learnt and kept in the model.
        name: of the run and of the registered model; None: by the settings and what the files hold.
        output: folder or address of object storage for all results.
        workers: data-parallel processes.
        callbacks: of the trainer, on every worker; with several workers they are pickled.
        settings: further settings by path, as those of a job's `--set`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed.pipeline.storage import absolute_storage

    check_addresses(model=model, name=name, output=output, settings=settings)
    storage = absolute_storage(str(output))
    path = rows_file(pairs, storage)
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"steps={steps} and epochs={epochs:g} are both given; give only one of them"
        )
    given = {
        "model.backbone.path": reference_of(model),
        "placement.storage_path": storage,
        "placement.workers": workers,
        "stages.finetune.loss": None if loss is None else loss_settings(loss),
        f"{_DATASET}.query_instruction": query_instruction,
        "stages.finetune.batch.global_pairs": batch_size,
        "stages.finetune.epochs": epochs,
        "stages.finetune.steps": steps,
        "stages.finetune.optimizer.learning_rate": learning_rate,
    }
    found = {setting: value for setting, value in given.items() if value is not None}
    return trained_by(_run_over(path, found, settings or {}, name), callbacks)


def trained_by(run: Run, callbacks: "Sequence[Callback]" = ()) -> Trained:
    """Train a run, after checking that all files and names in its settings exist.

    Raises:
        RayembedError: as `train`.
    """
    from rayembed.pipeline.checks.files import check_at_hand

    for callback in callbacks:
        _check_callback(callback)
    with shown():
        found = check_at_hand(run)
        for warning in found.warnings:
            logger.warning("%s", warning)
        from rayembed.pipeline.run.train import train as train_run

        return Trained(train_run(found.run, callbacks=callbacks))


def _run_over(
    path: str, found: Mapping[str, Any], settings: Mapping[str, Any], name: str | None
) -> Run:
    """Build the run of `train` for the rows at `path`.

    Args:
        found: settings by the arguments, before what the rows say.
        settings: further ones, before both.
        name: of the run; None: by the settings and what the files hold.

    Raises:
        RayembedError: as `train`.
    """
    form = {name: settings.get(f"{_DATASET}.source.{name}") for name in _FORM}
    look = look_at(path, **form)
    seen: dict[str, Any] = {f"{_DATASET}.source.path": path}
    share = held_out_share(look.documents)
    held_out = {} if share == 0.1 else {f"{_DATASET}.held_out.share": share}
    seen |= held_out if share else _UNSCORED
    if {"sentence1", "sentence2", "score"} <= look.columns:
        source = {"kind": "graded", "path": path, "max_rejected_share": OWN_REJECTED_SHARE}
        seen |= {f"{_DATASET}.source": source}
        seen |= {"stages.finetune.batch.in_batch_negatives": False}
        seen |= {"stages.finetune.loss": {"kind": "cosent"}}
    elif look.negatives:
        seen |= {f"{_DATASET}.source.negatives": "negatives"}
        seen |= {"stages.finetune.batch.num_negatives": look.negatives}
    # A power of two, of which any usual number of workers has an equal share.
    left = look.rows - int(look.rows * (share or 0))
    fitting = min(64, 1 << max(2, left // 2).bit_length() - 1)
    seen |= {"stages.finetune.batch.global_pairs": fitting}
    run = override(get_recipe(OWN_PAIRS), assignments_of({**seen, **found, **settings}))
    return run.model_copy(update={"name": name or default_name("pairs", run, look.keys)})


def loss_settings(loss: object) -> dict[str, Any]:
    """Convert a loss, or the name of one, to settings.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(loss, LossConfig):
        return loss.model_dump(mode="json")
    if isinstance(loss, str):
        return {"kind": loss}
    called = f"; call it, as in {loss.__name__}()" if isinstance(loss, type) else ""
    raise ConfigError(
        f"loss = {loss!r} must be a loss of rayembed.losses, such as InfoNCE(temperature=0.02), or "
        f"the name of one, such as 'infonce'{called}"
    )


def _check_callback(callback: object) -> None:
    from rayembed.training.trainer import Callback

    if not isinstance(callback, Callback):
        raise ConfigError(
            f"callbacks: {callback!r} is not a rayembed.training.trainer.Callback; derive a "
            "class from Callback and pass an instance of it (docs/python.md)"
        )


_MANY_ROWS = 20_000
_MANY_DOCUMENTS = 10 * (_HELD_OUT + 1)
"""Number of documents from which a tenth of the read rows suffices."""


@dataclass
class RowsLook:
    """Properties of the training rows, from which `train` derives default settings."""

    rows: int = 0
    """Number of rows read: all, or the first of many."""
    columns: set[str] = field(default_factory=set)
    """Names of the columns that any row has."""
    negatives: int = 0
    """Maximum number of negatives of a row, in a column `negatives`; at most 7."""
    documents: int = 0
    """Number of distinct cells of the column `positive`, of graded pairs `sentence2`."""
    keys: list[str] = field(default_factory=list)
    """Keys of the files' pieces, which change with the content."""


_FORM = ("delimiter", "encoding", "quotes")
"""Settings of a source that describe the format of its files."""


def look_at(
    path: str, *, delimiter: str | None, encoding: str | None, quotes: str | None = None
) -> RowsLook:
    """Read the training rows once for the properties that default settings depend on; of large
    files only the first rows.

    Raises:
        DataError: there are no rows.
    """
    from rayembed.data.sources.files import list_pieces
    from rayembed.data.sources.rows import Row, read_rows

    pieces = list_pieces(path, delimiter=delimiter, encoding=encoding, quotes=quotes)
    look, seen = RowsLook(keys=[piece.key for piece in pieces]), set[int]()
    for row in (row for piece in pieces for row in read_rows(piece)):
        look.rows += 1
        if not isinstance(row, Row):
            continue
        look.columns.update(row.values)
        second = row.values.get("sentence2", look.rows)
        seen.add(hash(str(row.values.get("positive", second))))
        look.negatives = max(look.negatives, min(_negatives_in(row), _MOST_NEGATIVES))
        if look.rows >= _MANY_ROWS and len(seen) >= _MANY_DOCUMENTS:
            break  # more of either would change nothing
    if not look.rows:
        raise DataError(f"the training data are empty: there are no rows at {path!r}")
    look.documents = len(seen)
    return look


def _negatives_in(row: "Row") -> int:
    """Number of texts in a row's column `negatives`; 1 for an unreadable cell, which conversion
    rejects later.
    """
    from rayembed.data.sources.cells import RowError, texts_in

    try:
        return len(texts_in(row.values, "negatives", json_lists=row.json_lists))
    except RowError:
        return 1


def held_out_share(documents: int) -> float | None:
    """Share of documents to hold out: at least a tenth, more for small sets, None for very small
    ones.
    """
    if documents < 4 * _HELD_OUT:
        return None
    return max(0.1, math.ceil(100 * (_HELD_OUT + 1) / documents) / 100)
