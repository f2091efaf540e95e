"""Run a trial: finetune a backbone with one learning rate, batch size and seed, and score it."""

import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rayembed.assets.finite import check_finite
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.storage import join, upload_folder, write_atomic
from rayembed.config.backbone import Dtype
from rayembed.config.document import fingerprint
from rayembed.errors import ArtifactError, DivergenceError
from rayembed.models.loading.files import weights_fingerprint
from rayembed_papers.backbone.finetune import Grid, finetune, predictor
from rayembed_papers.backbone.heads import encoder_folder, load_with_head, save_with_head
from rayembed_papers.backbone.kinds import Predict, TaskWork, work_of
from rayembed_papers.backbone.metrics import Metrics
from rayembed_papers.backbone.rows import StoredRows, load
from rayembed_papers.backbone.tasks import Finetuning, TaskRows
from rayembed_papers.backbone.tokens import BackboneTokenizer

Scores = dict[str, dict[str, Metrics]]
"""Task → subset → metric → score."""


@dataclass(frozen=True)
class Backbone:
    """The encoder under evaluation, with weights and number type; the same in all trials."""

    reference: str
    name: str
    weights: str
    """Fingerprint of weights, tokenizer and settings of the folder."""
    precision: Dtype
    head_dropout: float

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything about the encoder that affects scores."""
        return fingerprint([self.weights, self.precision, self.head_dropout])


@dataclass(frozen=True)
class Trial:
    """A finetuning with one combination of settings, and the folder of its result; picklable."""

    backbone: Backbone
    finetuning: Finetuning
    grid: Grid
    data: Mapping[TaskRows, StoredRows]
    folder: str
    """Folder of the backbone's results, in storage."""
    keeps_model: bool = False
    """Whether other trials start from its model."""
    start: "Trial | None" = None
    """The trial whose model it starts from; None: it starts from the backbone."""

    @cached_property
    def key(self) -> str:
        """Name of the trial, unique for all settings that affect its scores."""
        data = [self.data[rows].version for rows in self.finetuning.all_rows]
        start = None if self.start is None else self.start.key
        decides = fingerprint(
            [self.backbone.fingerprint, self.finetuning.fingerprint, data, start, asdict(self.grid)]
        )
        grid = self.grid
        shown = f"lr{grid.learning_rate:g}-batch{grid.batch_size}-seed{grid.seed}"
        return f"{self.finetuning.name}/{shown}-{decides}"

    @property
    def result_path(self) -> str:
        """Path of the result's JSON file, written when the trial is finished."""
        return join(self.folder, "trials", f"{self.key}.json")

    @property
    def model_path(self) -> str:
        """Path of the finetuned model, if it is kept."""
        return join(self.folder, "models", self.key)


def run_trial(trial: Trial, *, use_gpu: bool, predict_batch: int) -> None:
    """Finetune and score a model, keep it if others start from it, then write the result.

    One that diverged, by its loss or by what its model gives, gets neither scores nor a model: its
    result records it, so that it is not repeated.

    Raises:
        ArtifactError: the backbone has other weights here than where the job began, or is damaged.
        AssetError: its reference leads nowhere on this machine.
    """
    import transformers

    began = time.monotonic()
    home = resolve_model(trial.backbone.reference)
    if (seen := weights_fingerprint(home)) != trial.backbone.weights:
        raise ArtifactError(
            f"the backbone {trial.backbone.reference!r} has the weights {seen} on this machine, "
            f"but the job began with the weights {trial.backbone.weights}; give all machines the "
            "same weights"
        )
    one, protocol = trial.finetuning, trial.finetuning.protocol
    work = work_of(one, BackboneTokenizer(encoder_folder(home), protocol.max_length))
    transformers.set_seed(trial.grid.seed)
    source = encoder_folder(home) if trial.start is None else resolve(trial.start.model_path)
    model = load_with_head(source, one, head_dropout=trial.backbone.head_dropout)
    inputs = work.training_inputs(load(trial.data[one.train]))
    precision = trial.backbone.precision
    loss = finetune(
        model, inputs, work.collate, protocol, trial.grid, precision=precision, use_gpu=use_gpu
    )
    trained = time.monotonic()
    device = "cuda" if use_gpu else "cpu"
    scores: Scores = {}
    if math.isfinite(loss):
        predict = predictor(model, rows=predict_batch, precision=precision, device=device)
        scores = _scores(trial, work, predict)
    if trial.keeps_model and scores:
        check_finite(model.state_dict().items(), f"the fine-tuned {trial.backbone.reference!r}")
        with tempfile.TemporaryDirectory(prefix="model-") as scratch:
            save_with_head(model, Path(scratch))
            upload_folder(Path(scratch), trial.model_path)
    result = {
        **_about(trial),
        "training_loss": loss if math.isfinite(loss) else None,
        "training_inputs": len(inputs),
        "training_seconds": round(trained - began, 1),
        "seconds": round(time.monotonic() - began, 1),
        "device": device,
        "scores": scores,
    }
    write_atomic(trial.result_path, json.dumps(result, indent=1, ensure_ascii=False).encode())


def _scores(trial: Trial, work: TaskWork, predict: Predict) -> Scores:
    """Score all tasks; empty if the model's outputs are not finite."""
    one, scores = trial.finetuning, {}
    for task in one.tasks:
        rows = {s.subset: load(trial.data[s.rows]) for s in one.scored if s.task == task}
        try:
            scores[task] = work.score(predict, task, rows)
        except DivergenceError:
            return {}
    return scores


def _about(trial: Trial) -> dict[str, Any]:
    """Describe the trial's settings, data and versions for its result file."""
    one = trial.finetuning
    return {
        "finetuning": one.name,
        **asdict(trial.grid),
        "backbone": asdict(trial.backbone),
        "protocol": one.protocol.model_dump(mode="json"),
        "start": None if trial.start is None else trial.start.key,
        "data": {
            f"{rows.repository}/{rows.path}": trial.data[rows].version for rows in one.all_rows
        },
        "versions": {name: version(name) for name in ("rayembed", "torch", "transformers")},
    }
