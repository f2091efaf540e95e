"""Out-of-memory handling of a stage: the error message, and a plan that uses less memory after the
next restart.

A step that ran out of memory would do so at every start, as the plan is the same. So the worker
that fails leaves a smaller memory plan beside the stage's checkpoints, and all workers of the next
start follow it, if it has the same GPUs and settings. No worker has to agree with the others amid a
broken collective.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.optimizer import TrainLoopConfig
from rayembed.config.placement import Placement
from rayembed.config.stage import StageConfig
from rayembed.distributed.collectives import gather_texts, largest, rank
from rayembed.errors import ArtifactError, DeviceMemoryError
from rayembed.machine.hardware import device_label, memory_in_use, micro_batch_tokens, ran_out
from rayembed.models.attention.unpadded import packs
from rayembed.models.contract import EmbeddingModel, TrainableModel, to_device
from rayembed.models.layers import recomputable_layers
from rayembed.models.passes.fitting import first_line
from rayembed.models.passes.micro_batches import collate
from rayembed.training.memory.graph_room import Choice, GraphRoom

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

_HELD = (
    "No smaller plan helps there, but another process may hold the GPU, such as a worker that died "
    "just now (`nvidia-smi` lists them): it is tried again, placement.max_failures times at most"
)
"""What the next start may do about memory that runs out outside steps."""

_MEASURED_WITH = (
    *("workers", "zero_stage", "reduce_once", "expert_parallel", "grad_cache"),
    *("gradient_checkpointing", "micro_batch_tokens", "unpadded", "compile_layers"),
    "deterministic",
)
"""Settings of `placement` that decide what a start has in memory. Of workers it is the most that a
run takes: on a changing cluster the plan of fewer is followed by more."""


@dataclass(frozen=True)
class MemoryPlan:
    """Limits of kept activations and micro-batch size of a stage, measured once and stored for all
    workers and restarts.
    """

    micro_batch_tokens: int | None = None
    """Tokens of a forward pass if the run sets none; None: not decided yet."""
    graph_bytes: int | None = None
    """Maximum bytes of a worker's graphs; None: all free memory."""
    measured_with: dict[str, Any] = field(default_factory=dict)
    """Devices and settings of the start that made the plan."""

    @classmethod
    def read(cls, folder: str) -> "MemoryPlan":
        """Read the memory plan from a folder in storage; return an empty plan if the folder has
        none.

        Raises:
            ArtifactError: the file is no plan.
        """
        path = join(folder, MEMORY_FILE)
        if not exists(path):
            return cls()
        try:
            plan = cls(**json.loads(read_bytes(path)))
            return replace(plan, measured_with=dict(plan.measured_with))
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                f"{path} is not a valid memory plan ({error}); remove the file, and "
                "training measures memory again"
            ) from error

    def write(self, folder: str) -> None:
        """Write the memory plan into a folder in storage."""
        write_atomic(join(folder, MEMORY_FILE), json.dumps(asdict(self)).encode())


class StageMemory:
    """Applies the memory plan of one stage on this worker, and adds advice to out-of-memory
    errors.

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
        self._fixed = placement.deterministic and device.type == "cuda"
        self._room: GraphRoom | None = None
        self.plan = MemoryPlan() if folder is None else self._followed(folder)
        """Plan of this start."""
        if folder is not None and self.plan.graph_bytes is not None and not rank():
            logger.info(
                "stage %s ran out of memory in an earlier start, so it keeps fewer "
                "activations: %s (memory plan: %s)",
                *(stage.name, self._kept(self.plan.graph_bytes), join(folder, MEMORY_FILE)),
            )

    def room(self, model: TrainableModel, to_come: Callable[[], int]) -> GraphRoom:
        """Make the `GraphRoom`, which measures memory and decides which activations each step
        keeps.

        Where a GPU must compute the same bits each time nothing goes by the memory that is free:
        `auto` is GradCache with all layers recomputed.

        Args:
            to_come: as `GraphRoom` takes it.
        """
        cache: Choice = self._placement.grad_cache
        recompute: Choice = self._placement.gradient_checkpointing
        if self._fixed:
            cache = True if cache == "auto" else cache
            layers = bool(recomputable_layers(model.trained_parts))
            recompute = layers if recompute == "auto" else recompute
        return GraphRoom(
            self._device,
            model,
            grad_cache=cache,
            recompute=recompute,
            to_come=to_come,
            limit=self.plan.graph_bytes,
        )

    def settle(self, room: GraphRoom, model: TrainableModel, engine: nn.Module) -> int:
        """Decide the number of tokens in a forward pass, the same for all workers and all restarts
        of the stage.

        The run's own number, else by memory where GPUs take packed texts and need not compute the
        same bits each time, as it was at the first start; else by hardware. A collective.

        Args:
            room: of this start, with the engine in memory.
            engine: what forward passes go through.
        """
        self._room = room
        if self._placement.micro_batch_tokens is not None:
            return self._tokens
        packed = self._device.type == "cuda" and not self._fixed and self._all_pack(model)
        planned = self.plan.micro_batch_tokens
        if planned is not None:
            # Of packed texts it may be more than padded ones have room for.
            self._tokens = planned if packed else min(planned, self._tokens)
        elif packed:
            forward, measured = _probe(model, engine, self._device)
            self._tokens = room.pass_tokens(forward, measured)
            self.plan = replace(self.plan, micro_batch_tokens=self._tokens)
            if self._folder is not None and not rank():
                self.plan.write(self._folder)
        return self._tokens

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Raise DeviceMemoryError if memory runs out in a step, and store a plan that needs less
        for the next start.

        Args:
            number: of the step, from 1.
        """
        try:
            yield
        except RuntimeError as error:
            if not ran_out(error):
                raise
            less = self._less()
            if less is not None and self._folder is not None:
                # Several workers may fail in the step: all of them write the same.
                less.write(self._folder)
            raised = self._error(f"in step {number}", error, self._next(less))
            raised.may_pass = less is not None
            raise raised from error

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Raise DeviceMemoryError if memory runs out outside of steps, where a smaller plan would
        not help.

        It may pass: a worker that died holds its GPU a moment longer, and so do other processes.
        """
        try:
            yield
        except RuntimeError as error:
            if not ran_out(error):
                raise
            raised = self._error("outside its steps", error, _HELD)
            raised.may_pass = True
            raise raised from error

    def _followed(self, folder: str) -> MemoryPlan:
        """Read the stored memory plan and agree on one for all workers; start with an empty plan if
        devices or settings have changed.
        """
        devices = sorted(set(gather_texts(device_label(self._device.type))))
        settings = {name: getattr(self._placement, name) for name in _MEASURED_WITH}
        now, plan = {"devices": devices, **settings}, MemoryPlan.read(folder)
        before = plan.measured_with
        changed = [name for name, value in now.items() if before.get(name) != value]
        if changed:
            if plan != MemoryPlan() and not rank():
                logger.info(
                    "stage %s: memory is measured again; the memory plan %s is ignored, "
                    "because these values have changed since it was made: %s",
                    *(self._stage.name, join(folder, MEMORY_FILE)),
                    ", ".join(f"{name} ({before.get(name)}, now {now[name]})" for name in changed),
                )
            plan = MemoryPlan()
        tokens = largest(plan.micro_batch_tokens or 0, self._device)
        limit = _NO_LIMIT if plan.graph_bytes is None else plan.graph_bytes
        limit = -largest(-limit, self._device)
        return MemoryPlan(tokens or None, None if limit == _NO_LIMIT else limit, now)

    def _all_pack(self, model: TrainableModel) -> bool:
        """Whether every worker packs texts in training mode; all workers must call it together."""
        pads = not (isinstance(model, EmbeddingModel) and packs(model.train()))
        return not largest(int(pads), self._device)

    def _less(self) -> MemoryPlan | None:
        """Make a memory plan that takes less memory than the current one; None if the settings
        allow none.
        """
        if self._folder is None or self._room is None or self._fixed:
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

    def _error(self, where: str, error: RuntimeError, then: str) -> DeviceMemoryError:
        """Make the error that describes where memory ran out, with advice.

        Args:
            then: what the next start does about it.
        """
        tokens = None if self._room is None else self._room.tokens
        passes = f"forward passes of {self._tokens:,} tokens"
        if tokens is not None:
            passes = f"{tokens.of_pass:,} tokens in a forward pass and {tokens.of_step:,} in a step"
        return DeviceMemoryError(
            f"stage {self._stage.name!r}: rank {rank()} ran out of memory {where}, with {passes}; "
            f"{memory_in_use(self._device.type)}. {then}. {self._advice()}. PyTorch says: "
            f"{first_line(error)}"
        )

    def _next(self, less: MemoryPlan | None) -> str:
        if less is None:
            return (
                "Nothing smaller is planned, and the next start would fail alike, unless another "
                "process held the GPU (`nvidia-smi` lists them)"
            )
        if less.micro_batch_tokens != self.plan.micro_batch_tokens:
            smaller = f"forward passes of {less.micro_batch_tokens:,} tokens"
        else:
            smaller = self._kept(less.graph_bytes or 0)
        return f"The next start plans with less: {smaller}"

    def _kept(self, limit: int) -> str:
        """Describe which activations are kept under a limit of bytes, for messages."""
        if limit:
            return f"at most {limit / 2**30:.2f} GiB of autograd graphs on a worker"
        names = {"grad_cache": "GradCache", "gradient_checkpointing": "all layers recomputed"}
        allowed = [text for name, text in names.items() if getattr(self._placement, name)]
        return ", ".join(allowed)

    def _advice(self) -> str:
        """List the settings that would reduce memory, first the memory-saving methods that are
        switched off.
        """
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
    """Make a forward pass over generated texts for measuring memory, and return it with its number
    of tokens.
    """
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
