"""Train one stage on one worker, with any objective and with callbacks. Knows no Ray.

Every worker makes a `StageTrainer` of the same settings and calls `fit`; all of them step together.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rayembed.config.optimizer import TrainLoopConfig
from rayembed.config.placement import Placement
from rayembed.data.plan.stream import prefetched, settled_step_processes
from rayembed.distributed.collectives import rank, world_size
from rayembed.errors import DataError
from rayembed.machine.ahead import done_ahead
from rayembed.machine.hardware import pass_cost_tokens
from rayembed.models.attention.unpadded import packs
from rayembed.models.contract import EmbeddingModel, TrainableModel, load_trainable_state
from rayembed.training.checkpoints.checkpoint import (
    Checkpoint,
    StatefulEngine,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.compiling import compiles
from rayembed.training.contrastive.hidden_states import StateErrors
from rayembed.training.dropped import DroppedSteps
from rayembed.training.engine import DeepSpeedEngine, expert_group
from rayembed.training.expert_parallel import spread_experts
from rayembed.training.memory.graph_room import bytes_to_come
from rayembed.training.memory.stage_memory import StageMemory
from rayembed.training.objective import MakeBatch, Objective, StepSettings
from rayembed.training.optimizer import learning_rate_factor

logger = logging.getLogger(__name__)

_READY = 2
"""Batches that are collated before their step."""

Stream = Callable[[MakeBatch, int, int, int, bool], Generator[Any]]
"""Batches from the first step to the second (exclusive), in order, made by a number of processes, 0
for a thread, that the run names or not; closed when training ends, also by an error."""

StepRecord = dict[str, Any]
"""Metrics of one step, ready for JSON."""


class Engine(StatefulEngine, Protocol):
    """Protocol of the engine that a trainer and its callbacks use."""

    model: TrainableModel

    @property
    def forward(self) -> nn.Module:
        """The module to call for forward passes."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backpropagate a scalar; `last` marks the step's last call."""
        ...

    def step(self, learning_rate_factor: float) -> tuple[float, float]:
        """Update the weights unless the gradient norm is not finite; return the learning rate and
        the norm.
        """
        ...

    def trainable_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full weight of each parameter, in the same order on all workers."""
        ...


class Callback:
    """Base class for callbacks: override the hooks that you need.

    All workers have the same callbacks and call them at the same moments, in their order, so a
    method may be collective. What `should_stop` and `should_save` answer must be the same on all
    workers.
    """

    def on_train_start(self, trainer: "StageTrainer", step: int) -> None:
        """Called when the engine is ready and training continues after `step` finished steps."""

    def on_step_end(self, record: StepRecord) -> None:
        """Called after each step; `record` holds its metrics, `step` counts from 1.

        Called before a run that diverges is ended, so that its last step is told too.
        """

    def should_stop(self, step: int) -> bool:
        """Return whether the stage ends after `step` finished steps.

        Asked after each step, before a checkpoint of it is made, and once before the first.
        """
        return False

    def should_save(self, step: int) -> bool:
        """Return whether to make an extra checkpoint after this step, which has no
        scheduled one.
        """
        return False

    def before_checkpoint(self) -> None:
        """Called before a checkpoint is written into a new local folder."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a local folder holds this worker's part of a checkpoint; the folder is
        removed afterwards.

        The platform's own callback, which comes after further ones, moves it away and stores it
        while training goes on. Where a step was dropped its checkpoint follows after the next that
        was not.
        """

    def on_train_end(self) -> None:
        """Called after the stage's last step, or after the step at which a callback stopped it."""


class StageTrainer:
    """Trains one stage on this worker: batches, steps, checkpoints and callbacks.

    Args:
        stage: steps, checkpoints and optimiser.
        model: with its initial weights, on the CPU.
        objective: makes batches of `plan` and runs steps.
        plan: what batches are made from; a checkpoint belongs to its `fingerprint`.
        seed: of dropout, and of draws that are the same on all workers.
        number: of the stage within its run; dropout is drawn differently for each.
        dtype: the model's.
        run_fingerprint: of the run that checkpoints belong to.
        stream: reads batches ahead.
    """

    def __init__(
        self,
        stage: TrainLoopConfig,
        placement: Placement,
        model: TrainableModel,
        objective: Objective,
        plan: Any,
        *,
        seed: int,
        number: int = 0,
        dtype: str = "float32",
        run_fingerprint: str = "",
        callbacks: Sequence[Callback] = (),
        stream: Stream = prefetched,
    ) -> None:
        self.stage, self.placement, self.model = stage, placement, model
        self.objective, self.plan, self.callbacks = objective, plan, callbacks
        self.device = torch.device("cuda" if placement.on_gpu else "cpu")
        self.position = expected_position(stage.name, run_fingerprint, plan.fingerprint)
        """Position that a checkpoint must have to go on from, but for its step."""
        self.engine: Engine
        self.settings: StepSettings
        self.seed, self._number, self._dtype, self._stream = seed, number, dtype, stream
        self._processes = settled_step_processes(placement, model)
        self._memory = StageMemory(stage, placement, self.device)
        self._engines = ExitStack()

    def fit(self, start: Checkpoint | None = None, *, memory: str | None = None) -> DeepSpeedEngine:
        """Train from the beginning or from a checkpoint; return the engine after the last step.

        Args:
            memory: folder in storage of the stage's memory plan; None: it is kept nowhere.

        Raises:
            DataError: a batch of another step than the next, or too few batches.
            DeviceMemoryError: the device's memory is too small.
            DivergenceError: too many steps in a row were dropped.
            RayembedError: the plan or the checkpoint cannot be used.
        """
        with self._memory.outside_steps():  # the first collectives take memory too
            self._memory = StageMemory(self.stage, self.placement, self.device, memory)
        with self._memory.outside_steps():
            return self._fit(start)

    def _fit(self, start: Checkpoint | None) -> DeepSpeedEngine:
        placement, model = self.placement, self.model
        if start is not None:
            load_trainable_state(model, start.weights())
        if placement.expert_parallel > 1:  # before they take room on a device
            spread_experts(model, expert_group(placement.expert_parallel))
        self._compiled = compiles(placement, self.stage, model, self.device)
        model, states = model.to(self.device), None
        if isinstance(model, EmbeddingModel):
            model.unpadded = placement.unpadded
            packs(model)  # tries the model before an engine partitions it
            states = self._state_errors(model)
        room = self._memory.room(
            model,
            # Asked in a step, when the engine is there.
            lambda: bytes_to_come(
                *(model, placement, world_size(), self.stage.optimizer.state_bytes),
                states=not engine.has_states,
            ),
        )
        if self._compiled:
            model.compile_layers()
        seed_worker(self.seed, self._number)
        # Counted now: an engine may partition the parameters.
        pass_cost = placement.pass_cost_tokens or pass_cost_tokens(self.device.type, model)
        engine = DeepSpeedEngine(
            model,
            self.stage,
            placement,
            self._dtype,
            world_size(),
            self.objective.teacher_widths(self.plan),
            states,
        )
        self._engines.callback(engine.close)
        position = self.position
        if start is not None:
            start.restore(engine)
            position = start.position
            logger.info("stage %s resumes after step %d", self.stage.name, position.step)
        settings = StepSettings(
            micro_batch_tokens=self._memory.settle(room, model, engine.forward),
            grad_cache=room,
            device=self.device,
            pass_cost_tokens=pass_cost,
            seed=self.seed,
        )
        self.train(engine, settings, position.step, position.dropped_steps)
        return engine

    def close(self) -> None:
        """Release the engines that `fit` used, so that the process can continue with other work."""
        self._engines.close()

    def _state_errors(self, model: EmbeddingModel) -> StateErrors | None:
        """Load the teacher of hidden states, and make the object that compares the model with it;
        None without a teacher.
        """
        teacher = self.objective.teacher(model, self.stage, self._dtype)
        if teacher is None:
            return None
        teacher = teacher.to(self.device)
        teacher.unpadded = self.placement.unpadded
        if packs(model) and not packs(teacher):  # both read the same micro-batches
            model.unpadded = "never"
        if self._compiled:
            teacher.compile_layers()
        return StateErrors(model, teacher)

    def train(
        self, engine: Engine, settings: StepSettings, step: int = 0, dropped_steps: int = 0
    ) -> None:
        """Continue training with an existing engine after `step` finished steps; raises the same
        errors as `fit`.
        """
        self.engine, self.settings = engine, settings
        dropped = DroppedSteps(
            self.stage,
            self.placement.end_after_dropped_steps,
            lambda number: self.objective.source(self.plan, number),
            count=dropped_steps,
            saved=step,
            tells=rank() == 0,
            trace=self.objective.trace,
        )
        for callback in self.callbacks:
            callback.on_train_start(self, step)
        if step < self.stage.steps and not self._stops(step):
            make = self.objective.batches(self.plan, engine.model, self.stage, self.seed)
            ahead = partial(self.objective.ahead, engine.model, stage=self.stage, settings=settings)
            made = self._stream(make, step, self.stage.steps, *self._processes)
            with closing(done_ahead(ahead, made, read_ahead=_READY)) as batches:
                self._steps(batches, settings, step, dropped)
        for callback in self.callbacks:
            callback.on_train_end()

    def _steps(
        self, batches: Generator[Any], settings: StepSettings, done: int, dropped: DroppedSteps
    ) -> None:
        stage, engine = self.stage, self.engine
        engine.model.train()
        due = False
        ended = time.perf_counter()
        for batch in batches:
            if batch.step != done:
                raise DataError(
                    f"stage {stage.name!r}: the batch plan gave the batch of step "
                    f"{batch.step}, but the batch of step {done} was expected"
                )
            waited = time.perf_counter() - ended
            with self._memory.step(done + 1):
                report = self.objective.run_step(
                    engine.model, engine.forward, engine.backward, batch, stage, settings
                )
                rate, norm = engine.step(learning_rate_factor(done, stage))
            now = time.perf_counter()
            done += 1
            dropped.note(done, report.loss, norm, rate)
            record = {
                "stage": stage.name,
                "step": done,
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
            for callback in self.callbacks:
                callback.on_step_end(record)
            ended = time.perf_counter()
            dropped.check(done)
            ends = self._stops(done) or done == stage.steps
            due = due or ends or done % stage.checkpoint_every_steps == 0 or self._saves(done)
            # Nobody knows after a dropped step whether the model still computes, and the last good
            # checkpoint must stay.
            if due and (not dropped.in_a_row or done == stage.steps):
                self._save(done, dropped.count)
                dropped.saved(done)
                due = False
            if ends:
                return
        raise DataError(
            f"stage {stage.name!r}: the batch plan has only {done} of {stage.steps} steps, "
            "so its files are damaged: remove the folder of the plan and start again"
        )

    def _stops(self, step: int) -> bool:
        answers = [callback.should_stop(step) for callback in self.callbacks]
        return any(answers)

    def _saves(self, step: int) -> bool:
        answers = [callback.should_save(step) for callback in self.callbacks]
        return any(answers)

    def _save(self, step: int, dropped_steps: int) -> None:
        for callback in self.callbacks:
            callback.before_checkpoint()
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        try:
            save_checkpoint(folder, self.engine, self.position.at(step, dropped_steps))
            for callback in self.callbacks:
                callback.on_checkpoint(step, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
