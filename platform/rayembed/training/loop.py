"""The loop over the steps of one stage on one worker. Independent of Ray and DeepSpeed."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from rayembed.config.train_loop import TrainLoopConfig
from rayembed.distributed.collectives import world_size
from rayembed.errors import DataError
from rayembed.models.contract import TrainableModel
from rayembed.training.dropped import DroppedSteps
from rayembed.training.schedule import learning_rate_factor
from rayembed.training.step import StepReport, StepSettings, run_step


class Engine(Protocol):
    """Engine methods that the loop needs."""

    model: TrainableModel

    @property
    def forward(self) -> torch.nn.Module:
        """Module to call for forward passes."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backpropagate a scalar."""
        ...

    def step(self, learning_rate_factor: float) -> tuple[float, float]:
        """Update the weights unless the gradient norm is not finite; the learning rate and the
        norm.
        """
        ...


StepRecord = dict[str, Any]
"""Metrics of one step, ready for JSON."""


class Batch(Protocol):
    """Batch attributes that the loop needs."""

    @property
    def step(self) -> int:
        """Step number, from 0."""
        ...


RunStep = Callable[..., StepReport]
"""Accumulates the gradients of a step: called with the model, the engine's module and its
`backward`, the batch, the loop settings and the step settings, as `run_step` is."""


def train_steps(
    engine: Engine,
    batches: Iterable[Batch],
    stage: TrainLoopConfig,
    settings: StepSettings,
    *,
    start_step: int,
    dropped: DroppedSteps,
    on_step: Callable[[StepRecord], None],
    on_checkpoint: Callable[[int], None],
    ends_after: Callable[[int], bool] = lambda step: False,
    saves_now: Callable[[], bool] = lambda: False,
    run_step: RunStep = run_step,
) -> None:
    """Train from `start_step` to the last step of the stage, or until it should stop.

    Args:
        batches: this worker's step batches from `start_step` on, in order.
        dropped: counts the steps whose update was left out.
        on_step: called after each step with its metrics.
        on_checkpoint: called with the number of finished steps, every `checkpoint_every_steps`
            and after the last. Where the step was dropped it is called after the next that was not:
            nobody knows whether the model still computes, and the last good one must stay.
        ends_after: asked on all workers with the number of finished steps, before a checkpoint of
            them; the answer is the same on all.
        saves_now: asked alike after the other steps: whether a checkpoint is made out of turn.
        run_step: what is done with a batch.

    Raises:
        DataError: a batch of another step than the next, or too few batches.
        DivergenceError: too many steps in a row were dropped.
    """
    engine.model.train()
    expected = start_step
    due = False
    ended = time.perf_counter()
    for batch in batches:
        if batch.step != expected:
            raise DataError(f"stage {stage.name!r}: got step {batch.step}, expected {expected}")
        waited = time.perf_counter() - ended
        report = run_step(engine.model, engine.forward, engine.backward, batch, stage, settings)
        rate, norm = engine.step(learning_rate_factor(batch.step, stage))
        now = time.perf_counter()
        expected += 1
        dropped.note(expected, report.loss, norm, rate)
        on_step(
            {
                "stage": stage.name,
                "step": expected,
                "loss": report.loss,
                "learning_rate": rate,
                "grad_norm": norm,
                "dropped_steps": dropped.count,
                "seconds": now - ended,
                "wait_seconds": waited,
                f"{stage.row_name}_per_second": stage.global_rows / (now - ended),
                "tokens": report.tokens,
                "padding_share": 1 - report.tokens / report.padded_tokens,
                "micro_batches": report.micro_batches,
                "workers": world_size(),
                **report.metrics,
            }
        )
        ended = time.perf_counter()
        dropped.check(expected)
        ends = ends_after(expected) or expected == stage.steps
        due = due or ends or expected % stage.checkpoint_every_steps == 0 or saves_now()
        if due and (not dropped.in_a_row or expected == stage.steps):
            on_checkpoint(expected)
            dropped.saved(expected)
            due = False
        if ends:
            return
    raise DataError(f"stage {stage.name!r}: batches ended at step {expected} of {stage.steps}")
