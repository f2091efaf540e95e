"""What a stage's training does when memory runs out: the error, and less for the next start.

A step that ran out of memory would do so at every start, as the plan is the same. So the worker
that fails leaves a smaller memory plan beside the stage's checkpoints, and all workers of the next
start follow it. No worker has to agree with the others amid a broken collective.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.placement import Placement
from rayembed.config.stage import StageConfig
from rayembed.config.train_loop import TrainLoopConfig
from rayembed.distributed.collectives import largest, rank
from rayembed.errors import ArtifactError, DeviceMemoryError
from rayembed.hardware import memory_in_use, micro_batch_tokens
from rayembed.models.contract import EmbeddingModel, TrainableModel, to_device
from rayembed.models.micro_batches import collate
from rayembed.models.unpadded import packs
from rayembed.training.graph_room import GraphRoom

logger = logging.getLogger(__name__)

MEMORY_FILE = "memory.json"
"""File name of a stage's memory plan, within the folder of its checkpoints."""

_FEWEST = 256
"""Tokens of a forward pass below which nothing is gained by fewer."""

_FEWER = 4
"""Factor between the tokens of a pass that ran out of memory and of those at the next start."""

_PROBED_WORDS, _PROBED_TEXTS = 500, 4
"""Words of a text, and texts, of the pass that is measured before training."""

_NO_LIMIT = 2**62


@dataclass(frozen=True)
class MemoryPlan:
    """What all workers and starts of a stage have in common."""

    micro_batch_tokens: int | None = None
    """Tokens of a forward pass where the run names none; None: not settled yet."""
    graph_bytes: int | None = None
    """Bytes that a worker's graphs may take at most; None: all that memory has room for."""

    @classmethod
    def read(cls, folder: str) -> "MemoryPlan":
        """Read the plan in a folder of storage; an empty one if there is none.

        Raises:
            ArtifactError: the file is no plan.
        """
        path = join(folder, MEMORY_FILE)
        if not exists(path):
            return cls()
        try:
            return cls(**json.loads(read_bytes(path)))
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                f"{path} is no memory plan ({error}); remove it, and training measures memory again"
            ) from error

    def write(self, folder: str) -> None:
        """Write the plan into a folder of storage."""
        write_atomic(join(folder, MEMORY_FILE), json.dumps(asdict(self)).encode())


class StageMemory:
    """Memory plan of one stage on this worker, and the errors of what does not fit.

    Args:
        folder: of the stage's checkpoints, in storage; None: the plan is kept nowhere.
    """

    def __init__(
        self,
        stage: TrainLoopConfig,
        placement: Placement,
        device: torch.device,
        folder: str | None = None,
    ) -> None:
        self._stage, self._placement, self._device = stage, placement, device
        self._folder = folder
        self._tokens = placement.micro_batch_tokens or micro_batch_tokens(device.type)
        self._room: GraphRoom | None = None
        self.plan = MemoryPlan() if folder is None else self._agreed(MemoryPlan.read(folder))
        """Plan of this start."""
        if folder is not None and self.plan.graph_bytes is not None and not rank():
            logger.info(
                "stage %s ran out of memory before: graphs of a worker may take %.2f GiB (%s)",
                *(stage.name, self.plan.graph_bytes / 2**30, join(folder, MEMORY_FILE)),
            )

    def settle(self, room: GraphRoom, model: TrainableModel, engine: nn.Module) -> int:
        """Tokens of a forward pass, the same on all workers and at all starts of the stage.

        The run's own number, else that of the first start: by memory where GPUs take packed texts,
        else by hardware. A collective.

        Args:
            room: of this start, with the engine in memory.
            engine: what forward passes go through.
        """
        self._room = room
        asked, planned = self._placement.micro_batch_tokens, self.plan.micro_batch_tokens
        if asked is None and planned is not None:
            self._tokens = planned
        elif asked is None and self._device.type == "cuda" and self._all_pack(model):
            forward, measured = _probe(model, engine, self._device)
            self._tokens = room.pass_tokens(forward, measured)
            self.plan = replace(self.plan, micro_batch_tokens=self._tokens)
            if self._folder is not None and not rank():
                self.plan.write(self._folder)
        return self._tokens

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Raise DeviceMemoryError when memory runs out in a step, and plan less for the next start.

        Args:
            number: of the step, from 1.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            less = self._less()
            if less is not None and self._folder is not None:
                # Several workers may fail in the step: all of them write the same.
                less.write(self._folder)
            raise self._error(f"in step {number}", error, less) from error

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Raise DeviceMemoryError when memory runs out where no smaller plan would help."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._error("outside its steps", error, None) from error

    def _agreed(self, plan: MemoryPlan) -> MemoryPlan:
        """The plan that all workers follow, also if they have read different ones."""
        tokens = largest(plan.micro_batch_tokens or 0, self._device)
        limit = _NO_LIMIT if plan.graph_bytes is None else plan.graph_bytes
        limit = -largest(-limit, self._device)
        return MemoryPlan(tokens or None, None if limit == _NO_LIMIT else limit)

    def _all_pack(self, model: TrainableModel) -> bool:
        """Whether every worker packs texts, in training mode; a collective."""
        pads = not (isinstance(model, EmbeddingModel) and packs(model.train()))
        return not largest(int(pads), self._device)

    def _less(self) -> MemoryPlan | None:
        """Plan that takes less memory than this start's; None: the settings allow none."""
        if self._folder is None or self._room is None:
            return None
        limit = self._room.less()
        if limit is not None:
            return replace(self.plan, graph_bytes=limit)
        if self._placement.micro_batch_tokens or self._placement.grad_cache is False:
            return None
        tokens = self._room.tokens
        if self._tokens <= _FEWEST or (tokens is not None and tokens.of_pass > self._tokens):
            return None  # a text alone has more tokens than a pass should have
        return replace(self.plan, micro_batch_tokens=max(_FEWEST, self._tokens // _FEWER))

    def _error(
        self, where: str, error: torch.OutOfMemoryError, less: MemoryPlan | None
    ) -> DeviceMemoryError:
        tokens = None if self._room is None else self._room.tokens
        passes = f"forward passes of {self._tokens:,} tokens"
        if tokens is not None:
            passes = f"{tokens.of_pass:,} tokens in a forward pass and {tokens.of_step:,} in a step"
        raised = DeviceMemoryError(
            f"stage {self._stage.name!r}: rank {rank()} ran out of memory {where}, with {passes}; "
            f"{memory_in_use(self._device.type)}. {self._next(less)}. {self._advice()}. PyTorch "
            f"says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        raised.plans_less = less is not None
        return raised

    def _next(self, less: MemoryPlan | None) -> str:
        if less is None:
            return "Nothing smaller is planned, and the next start would fail alike"
        if less.micro_batch_tokens != self.plan.micro_batch_tokens:
            smaller = f"forward passes of {less.micro_batch_tokens:,} tokens"
        elif less.graph_bytes:
            smaller = f"at most {less.graph_bytes / 2**30:.2f} GiB of graphs"
        else:
            smaller = "one graph at a time (GradCache), as many layers recomputed as settings allow"
        return f"The next start plans with less: {smaller}"

    def _advice(self) -> str:
        """What to set for less memory; names first what the settings forbid."""
        placement, ways = self._placement, []
        for name in ("grad_cache", "gradient_checkpointing"):
            if getattr(placement, name) is False:
                ways.append(f"set placement.{name}=auto (it is false)")
        if self._tokens > _FEWEST:
            ways.append(f"lower placement.micro_batch_tokens ({self._tokens})")
        ways.append(f"raise placement.zero_stage ({placement.zero_stage})")
        ways.append(f"raise placement.workers ({placement.workers})")
        if isinstance(self._stage, StageConfig):
            ways.append(f"lower stages.{self._stage.name}.document_max_length")
        advice = f"{', '.join(ways[:-1])}, or {ways[-1]}"
        return f"{advice[0].upper()}{advice[1:]}"


def _probe(model: Any, engine: nn.Module, device: torch.device) -> tuple[Callable[[], Any], int]:
    """A packed pass over made-up texts, and its tokens."""
    texts = [" ".join(["word"] * _PROBED_WORDS)] * _PROBED_TEXTS
    tokens = model.tokenizer(texts, "document")
    batch = collate(model, tokens, range(len(tokens)))
    batch |= model.known_ahead(batch)
    batch |= {"occurrences": torch.ones(len(tokens), dtype=torch.int64)}
    given = to_device(batch, device)

    def forward() -> Any:
        if not model.uses_context:
            return engine(given, None)
        return engine(given, engine(given, only_context=True))

    measured = sum(len(one["input_ids"]) + model.added_tokens for one in tokens)
    return forward, measured * (2 if model.uses_context else 1)
