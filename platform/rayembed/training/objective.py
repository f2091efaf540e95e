"""What a training is for: how an objective makes its batches and runs its steps."""

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
    """Execution settings of a step on this worker; only the seed affects results."""

    micro_batch_tokens: int
    grad_cache: bool | GraphRoom
    """Whether to use GradCache, or what says so of each step."""
    device: torch.device
    _: KW_ONLY
    pass_cost_tokens: int = 48
    """Cost of a forward pass beside its tokens, in tokens; see `hardware.pass_cost_tokens`."""
    seed: int = 0
    """Seed of draws from a global batch, the same on all workers."""

    @property
    def pins(self) -> bool:
        """Whether batches are put into memory that a device copies from by itself."""
        return self.device.type != "cpu"


@dataclass(frozen=True)
class StepReport:
    """Outcome of one step over all workers."""

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
    """What a stage is trained for: how its batches are made, and how the gradients of one are.

    An architecture names its objective by an import string, such as
    `rayembed.training.contrastive.step:CONTRASTIVE`.
    """

    trace: str = ""
    """Option of the job that shows the rows of `STAGE:STEP`; empty: the job has none."""

    def check(self, stage: Any) -> None:
        """Return when the objective can train the stage; asked before data is prepared.

        Raises:
            ConfigError: its loss, or another setting, does not fit.
        """
        return None

    def teacher_widths(self, plan: Any) -> tuple[int, ...]:
        """Widths of the vectors of teachers that go with the plan's rows."""
        return ()

    def teacher(self, model: Any, stage: Any, dtype: str) -> EmbeddingModel | None:
        """Model whose hidden states the trained one learns, on the CPU; None: there is none.

        Args:
            dtype: of its weights.

        Raises:
            RayembedError: it cannot be loaded, or its states cannot be compared with the model's.
        """
        return None

    @abstractmethod
    def batches(self, plan: Any, model: Any, stage: Any, seed: int) -> MakeBatch:
        """Builder of this worker's batches; each has its number as `step`."""

    def ahead(self, model: Any, batch: Any, stage: Any, settings: StepSettings) -> Any:
        """The batch as `run_step` takes it, with all that can be done before its step; it keeps its
        number as `step`.

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
        """Accumulate the gradients of one step in the model's parameters.

        Args:
            engine: what forward passes go through.
            backward: sends one scalar's gradient through its graph.
        """

    @abstractmethod
    def source(self, plan: Any, step: int) -> str:
        """What the batch of a step, from 0, was drawn from, as the end of `its batch is of …`."""
