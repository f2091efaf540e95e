"""Interface of training objectives: how an objective makes its batches and runs its steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from rayembed.distributed.grad_cache import Backward
from rayembed.models.contract import EmbeddingModel
from rayembed.training.memory.graph_room import GraphRoom

MakeBatch = Callable[[int], Any]
"""Builds this worker's batch of a step, counted from 0; picklable."""


@dataclass(frozen=True)
class StepSettings:
    """How a step is executed on this worker; of these settings only the seed affects results."""

    micro_batch_tokens: int
    grad_cache: bool | GraphRoom
    """Whether to use GradCache, or a function that decides it for each step."""
    device: torch.device
    _: KW_ONLY
    pass_cost_tokens: int = 48
    """Fixed cost of a forward pass, expressed in tokens; see `hardware.pass_cost_tokens`."""
    seed: int = 0
    """Seed for sampling from a global batch, the same on all workers."""

    @property
    def pins(self) -> bool:
        """Whether batches are copied into pinned memory for asynchronous copies to the GPU."""
        return self.device.type != "cpu"


@dataclass(frozen=True)
class StepReport:
    """Loss, token counts and metrics of one step over all workers."""

    loss: float
    """Mean over workers."""
    texts: int
    """Sum of the workers' distinct texts."""
    tokens: int
    padded_tokens: int
    micro_batches: int
    """Maximum over workers."""
    metrics: dict[str, float]
    """Model statistics of the global batch."""


class Objective(ABC):
    """Base class of training objectives: an objective makes a stage's batches and computes their
    gradients.

    An architecture names its objective by an import string, such as
    `rayembed.training.contrastive.step:CONTRASTIVE`.
    """

    trace: str = ""
    """Option of the job that shows the rows of `STAGE:STEP`; empty: the job has none."""

    def check(self, stage: Any) -> None:
        """Check that the objective can train the stage, before data is prepared.

        Raises:
            ConfigError: its loss, or another setting, does not fit.
        """
        return None

    def teacher_widths(self, plan: Any) -> tuple[int, ...]:
        """Return the widths of the teachers' vectors that are stored with the plan's rows."""
        return ()

    def teacher(self, model: Any, stage: Any, dtype: str) -> EmbeddingModel | None:
        """Load the teacher whose hidden states the student learns, on the CPU; None if the stage
        has none.

        Args:
            dtype: of its weights.

        Raises:
            RayembedError: it cannot be loaded, or its states cannot be compared with the model's.
        """
        return None

    @abstractmethod
    def batches(self, plan: Any, model: Any, stage: Any, seed: int) -> MakeBatch:
        """Return the builder of this worker's batches; every batch has its step number as
        `step`.
        """

    def ahead(self, model: Any, batch: Any, stage: Any, settings: StepSettings) -> Any:
        """Prepare a batch for `run_step` as far as possible in advance, in a thread; its `step`
        must not change.

        A thread calls it while the step before computes.
        """
        return batch

    @abstractmethod
    def run_step(
        self,
        model: Any,
        engine: nn.Module,
        backward: Backward,
        batch: Any,
        stage: Any,
        settings: StepSettings,
    ) -> StepReport:
        """Compute one step, and accumulate its gradients in the model's parameters.

        Args:
            engine: what forward passes go through.
            backward: sends one scalar's gradient through its graph.
        """

    @abstractmethod
    def source(self, plan: Any, step: int) -> str:
        """Describe where a step's batch (from 0) comes from, to complete the sentence `its batch is
        of …`.
        """
