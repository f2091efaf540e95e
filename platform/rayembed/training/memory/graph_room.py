"""Choose which activations a step keeps for the backward pass, by the free memory that was
measured.
"""

import logging
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rayembed.config.placement import Placement
from rayembed.distributed.collectives import largest, rank
from rayembed.distributed.random_state import capture, replayed
from rayembed.machine.hardware import free_memory, packed_tokens
from rayembed.models.contract import TrainableModel
from rayembed.models.layers import keeps_products, recomputable_layers

logger = logging.getLogger(__name__)

_FLOAT32 = 4

_SHARES = {"cpu": 0.5, "cuda": 0.9}
"""Share of the memory left that graphs may take. The rest is for the loss, what kernels take while
they work, buffers in which gradients are reduced, and on CPUs for other processes. Where a GPU's
does not suffice, the next start keeps less."""

_LESS = 0.75
"""Share of the bytes of a step that ran out of memory which the next start may keep."""
_WORTH = 0.1
"""Least share of a layer's bytes for which it keeps its products alone."""

Choice = bool | Literal["auto"]


@dataclass(frozen=True)
class Tokens:
    """Numbers of padded tokens that decide the memory of autograd graphs: of a whole step and of
    its largest pass.
    """

    of_step: int
    """Padded tokens of all passes of a step, on the worker with the most."""
    of_pass: int
    """Padded tokens of the largest forward pass on any worker."""


@dataclass(frozen=True)
class Way:
    """A strategy for activations: whether all graphs are kept, and how many layers are
    recomputed.
    """

    graphs: bool
    """Whether the graphs of all passes are kept; otherwise GradCache recomputes them one by one."""
    recomputed: int
    """Number of layers whose activations are recomputed in the backward pass."""
    between_products: int = 0
    """Number of further layers that are recomputed except for matrix products and attention."""


def ways(
    grad_cache: Choice, recompute: Choice, layers: int, *, products: bool = False
) -> list[Way]:
    """List the possible strategies for keeping activations, cheapest backward pass first.

    A layer that is computed again costs its share of the second forward pass that GradCache makes;
    one that keeps its products costs element-wise work.

    Args:
        products: whether layers may keep their products alone, as compiled ones may.
    """
    graphs = [True, False] if grad_cache == "auto" else [not grad_cache]
    numbers = range(layers + 1) if recompute == "auto" else [layers if recompute else 0]
    layers_of = [(number, 0) for number in numbers]
    if recompute == "auto" and products:
        layers_of = [(0, number) for number in numbers]
        layers_of += [(number, layers - number) for number in numbers[1:]]
    return [Way(all_of_them, *numbers) for all_of_them in graphs for numbers in layers_of]


class GraphRoom:
    """Measures autograd-graph bytes per token and free memory once, and chooses which activations
    each step keeps.

    Measured is the pass of the longest texts, whose tokens take the most. Every number that decides
    is reduced over the workers, which measure passes of different sizes: so all of them decide
    alike, and measure and reduce at the same moments. Results do not depend on what is kept.
    """

    def __init__(
        self,
        device: torch.device,
        model: TrainableModel,
        *,
        grad_cache: Choice = "auto",
        recompute: Choice = "auto",
        to_come: Callable[[], int] | None = None,
        limit: int | None = None,
    ) -> None:
        """Store the settings, and make layers recompute their activations if a setting
        requires it.

        Args:
            grad_cache: whether to use GradCache; `auto`: where graphs do not fit.
            recompute: whether to recompute the layers; `auto`: as many as do not fit.
            to_come: `bytes_to_come` of the training, asked when memory is measured; None: that of
                AdamW on one worker.
            limit: bytes that graphs may take at most, whatever memory is left; None: no limit.
        """
        self._device, self._model = device, model
        self._grad_cache: Choice = grad_cache
        self._layers = len(recomputable_layers(model.trained_parts))
        # A model without layers that know how has nothing to choose.
        self._recompute: Choice = recompute if self._layers or recompute is True else False
        if self._recompute is True:
            model.recompute_layers()
        alone = partial(bytes_to_come, model, Placement(zero_stage=0), 1, 12)
        self._to_come = to_come or alone
        self._limit = limit
        self.tokens: Tokens | None = None
        """Tokens of the step that was planned last."""
        self._needed: float | None = None
        self._is_last = True
        self._left: float | None = None
        self._whole: float | None = None
        self._bare: float | None = None
        self._saved_by_products: float | None = None
        """Bytes a token that a layer takes less where it keeps its products alone."""

    def keeps_graphs(
        self, forward: Callable[[], Any], measured: int, tokens: Tokens, *, several: bool = True
    ) -> bool:
        """Choose by free memory whether a step keeps the autograd graphs of all micro-batches, and
        which layers it recomputes; return whether it keeps all.

        Args:
            forward: the pass of the longest texts.
            measured: its padded tokens on this worker.
            tokens: the same on all workers.
            several: whether there are passes for GradCache to tell apart.
        """
        self.tokens = tokens
        grad_cache = self._grad_cache if several else False
        found = ways(grad_cache, self._recompute, self._layers)
        way = found[0]
        if len(found) > 1 and not self._fits(way, tokens, forward, measured):
            products = self._recompute == "auto" and self._products_are_less(forward, measured)
            found = ways(grad_cache, self._recompute, self._layers, products=products)
            fitting = (one for one in found[1:] if self._fits(one, tokens, forward, measured))
            way = next(fitting, found[-1])
        self._is_last = way == found[-1]
        if self._recompute == "auto":
            self._model.recompute_layers(way.recomputed, way.between_products)
        return way.graphs

    def less(self) -> int | None:
        """Return a lower memory limit than the last step needed, for the next start; None if a
        lower one is impossible.

        Three quarters of what the step was planned to keep; where it had a limit already, 0.
        """
        if self._is_last or self._needed is None or self._limit == 0:
            return None
        return int(_LESS * self._needed) if self._limit is None else 0

    def pass_tokens(self, forward: Callable[[], Any], measured: int) -> int:
        """Choose how many packed tokens a forward pass may have in the free memory; see
        `packed_tokens`.

        A collective, which does not affect what `keeps_graphs` measures.

        Args:
            forward: a pass through the engine.
            measured: its tokens.
        """
        if self._recompute is True:  # a layer that is computed again has its whole graph
            self._model.recompute_layers(0)
        with torch.compiler.set_stance("force_eager"):
            taken = saved_bytes(forward, self._model)
        if self._recompute is True:
            self._model.recompute_layers()
        a_token = largest(max(1, math.ceil(taken / measured)), self._device)
        left = -largest(-int(self._room()), self._device)
        tokens = packed_tokens(left, a_token)
        if not rank():
            logger.info(
                "forward passes have %s tokens (placement.micro_batch_tokens): autograd "
                "graphs need %.3g MB per token, and %.1f GiB of memory are free for graphs",
                *(f"{tokens:,}", a_token / 1e6, left / 2**30),
            )
        return tokens

    def _products_are_less(self, forward: Callable[[], Any], measured: int) -> bool:
        """Whether keeping only the matrix products of compiled layers is possible and takes less
        memory than whole layers; measured once, on all workers together.

        Where a compiler cuts the layer. Eager layers are cut operation by operation in Python,
        which costs the host more than to launch the whole layer again.
        """
        parts, layers = self._model.trained_parts, self._layers
        if any(layer._compiled_call_impl is None for layer in recomputable_layers(parts)):
            return False
        # Weights that an engine partitions are gathered by operations that must not be left out.
        partitioned = any(hasattr(p, "ds_numel") for p in self._model.parameters())
        if partitioned or not keeps_products(parts):
            return False
        if self._saved_by_products is None:
            self._model.recompute_layers(0, layers)
            taken = saved_bytes(forward, self._model)
            of_products = self._of_token(
                taken, measured, " with layers that keep only matrix products"
            )
            self._saved_by_products = ((self._whole or 0.0) - of_products) / layers
        return self._saved_by_products > _WORTH * self._of_layer(forward, measured)

    def _of_layer(self, forward: Callable[[], Any], measured: int) -> float:
        """Return the bytes per token that recomputing one layer saves."""
        return ((self._whole or 0.0) - self._recomputed(forward, measured)) / self._layers

    def _recomputed(self, forward: Callable[[], Any], measured: int) -> float:
        """Return the bytes per token of a graph with all layers recomputed; measured once, on all
        workers together.
        """
        if self._bare is None:
            self._model.recompute_layers()
            self._bare = self._of_token(graph_bytes(forward), measured, " with layers recomputed")
        return self._bare

    def _fits(self, way: Way, tokens: Tokens, forward: Callable[[], Any], measured: int) -> bool:
        if self._left is None:
            self._left = -largest(-int(self._room()), self._device)
            if self._limit is not None:
                self._left = min(self._left, self._limit)
        kept = tokens.of_step if way.graphs else tokens.of_pass
        bare = self._recomputed(forward, measured) if way.recomputed else 0.0
        if self._recompute is True:
            return self._holds(kept * bare)
        if self._whole is None:
            if self._recompute == "auto":
                self._model.recompute_layers(0)
            self._whole = self._of_token(saved_bytes(forward, self._model), measured)
        if not (way.recomputed or way.between_products):
            return self._holds(kept * self._whole)
        of_layer = self._of_layer(forward, measured)
        by_products = self._saved_by_products or 0.0
        saved = way.recomputed * of_layer + way.between_products * by_products
        # While a layer is computed again its graph is there too.
        again = of_layer if way.recomputed else by_products
        return self._holds(kept * (self._whole - saved) + tokens.of_pass * again)

    def _holds(self, needed: float) -> bool:
        self._needed = needed
        return self._left is not None and needed <= self._left

    def _of_token(self, taken: int, measured: int, how: str = "") -> float:
        """Return the bytes per token of a graph, the maximum over workers, and log it; all workers
        must call it together.
        """
        # The ratio, not the bytes: workers' first passes have different tokens.
        a_token = largest(max(1, math.ceil(taken / measured)), self._device)
        left = self._left or 0.0
        if not rank():
            beyond = "GradCache is used"
            if self._grad_cache is not True:
                beyond = (
                    "layers are recomputed" if self._recompute == "auto" and not how else beyond
                )
            logger.info(
                "autograd graphs take %.3g MB per token%s, and %.1f GiB of memory are free "
                "for graphs: %s for steps of more than %s tokens per worker",
                a_token / 1e6,
                how,
                left / 2**30,
                beyond,
                f"{int(left / a_token):,}",
            )
        return a_token

    def _room(self) -> float:
        free = free_memory(self._device.type)
        if self._device.type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(0.0, free - self._to_come()) * _SHARES[self._device.type]


def bytes_to_come(
    model: nn.Module, placement: Placement, workers: int, state_bytes: int, *, states: bool = True
) -> int:
    """Estimate the bytes of gradients and optimiser states that this worker has not
    allocated yet.

    They are counted as `pipeline.requirements.worker_memory` does. Master weights are there.

    Args:
        model: with this worker's share of the experts; its weights may be partitioned.
        state_bytes: of the optimiser for each trained weight, master weight included.
        states: whether the optimiser's states are still to come.
    """
    held = whole = 0
    for p in model.parameters():
        if p.requires_grad:
            # What ZeRO-3 has partitioned is empty between its uses.
            size = int(getattr(p, "ds_numel", p.numel()))
            held += size
            # Experts that are shared out, and only these, are marked so.
            whole += size if getattr(p, "allreduce", True) else size * placement.expert_parallel
    part = -(-whole // workers)
    gradients = held
    if placement.zero_stage >= 2 and not placement.reduce_once:
        # Stage 3 has made the buffer of its part when the engine is there.
        gradients = part if placement.zero_stage == 2 else 0
    moments = (part if placement.zero_stage else held) if states else 0
    return _FLOAT32 * gradients + (state_bytes - _FLOAT32) * moments


def graph_bytes(forward: Callable[[], Any]) -> int:
    """Measure the bytes that a forward pass holds until its backward pass, including its
    result.

    Compiled layers run uncompiled. Random numbers are those that the next forward pass draws as
    well.
    """
    # A compiler that meets a mode like `LiveBytes` leaves the layers' code alone from then on.
    with replayed(capture()), torch.compiler.set_stance("force_eager"), LiveBytes() as live:
        kept = forward()
        taken: int = live.now
    del kept
    return taken


def saved_bytes(forward: Callable[[], Any], model: nn.Module) -> int:
    """Measure the bytes that a forward pass would save for its backward pass, without keeping them,
    so that little memory is used.

    What is recomputed does not count, though its input would be held. Weights do not count. Random
    numbers are those that the next forward pass draws as well.
    """
    known = weakref.WeakSet[torch.UntypedStorage]()
    taken = 0

    def dropped(tensor: Tensor) -> None:
        nonlocal taken
        storage = tensor.untyped_storage()
        if storage not in known:
            known.add(storage)
            # Asked now: an engine that partitions gathers weights for the time of their use.
            if all(storage is not weight.untyped_storage() for weight in model.parameters()):
                taken += storage.nbytes()

    def never(_: None) -> Tensor:
        raise RuntimeError("a forward pass run only to measure memory has no backward pass")

    with replayed(capture()), saved_tensors_hooks(dropped, never):
        forward()
    return taken


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's base
    """Context that counts the bytes of all tensors which operations inside it create.

    Tensors that share memory count once, and those that were there before not at all. What a
    kernel takes while it works and gives back is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are in use."""
        self.peak = 0
        """Most bytes that were in use at a time."""
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [one.untyped_storage() for one in _tensors((args, kwargs))]
        self._known.update(given)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_iter(values) if isinstance(one, Tensor)]
