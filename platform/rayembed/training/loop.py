"""The loop over the steps of one stage, on one worker; knows neither Ray nor DeepSpeed."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.errors import DataError
from rayembed.models.contract import EmbeddingModel
from rayembed.training.schedule import learning_rate_factor
from rayembed.training.step import StepSettings, run_step


class Engine(Protocol):
    """What the loop needs of an engine."""

    model: EmbeddingModel

    @property
    def forward(self) -> torch.nn.Module:
        """The module to call for forward passes."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Send a scalar's gradient through its graph."""
        ...

    def step(self, learning_rate_factor: float) -> tuple[float, float]:
        """Update the weights; the learning rate and the gradient's norm."""
        ...


StepRecord = dict[str, Any]
"""Metrics of one step, ready for JSON."""


def train_steps(
    engine: Engine,
    batches: Iterable[StepBatch],
    stage: StageConfig,
    settings: StepSettings,
    *,
    start_step: int,
    on_step: Callable[[StepRecord], None],
    on_checkpoint: Callable[[int], None],
) -> None:
    """Train from `start_step` to the stage's last step.

    Args:
        batches: this worker's step batches from `start_step` on, in order.
        on_step: called after each step with its metrics.
        on_checkpoint: called with the number of finished steps, every `checkpoint_every_steps`
            and after the last.

    Raises:
        DataError: a batch of another step than the next, or too few batches.
    """
    engine.model.train()
    expected = start_step
    ended = time.perf_counter()
    for batch in batches:
        if batch.step != expected:
            raise DataError(f"stage {stage.name!r}: got step {batch.step}, expected {expected}")
        waited = time.perf_counter() - ended
        report = run_step(engine.model, engine.forward, engine.backward, batch, stage, settings)
        rate, norm = engine.step(learning_rate_factor(batch.step, stage))
        now = time.perf_counter()
        expected += 1
        on_step(
            {
                "stage": stage.name,
                "step": expected,
                "loss": report.loss,
                "learning_rate": rate,
                "grad_norm": norm,
                "seconds": now - ended,
                "wait_seconds": waited,
                "pairs_per_second": stage.batch.global_pairs / (now - ended),
                "tokens": report.tokens,
                "padding_share": 1 - report.tokens / report.padded_tokens,
                "micro_batches": report.micro_batches,
            }
        )
        ended = time.perf_counter()
        if expected % stage.checkpoint_every_steps == 0 or expected == stage.steps:
            on_checkpoint(expected)
        if expected == stage.steps:
            return
    raise DataError(f"stage {stage.name!r}: batches ended at step {expected} of {stage.steps}")
