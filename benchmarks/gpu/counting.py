"""Counts of a pass on torch's meta device: products, element-wise bytes, attention, kernels.

What is counted is what the model runs, operation by operation, and what a compiler could at best
leave of it: between two products all element-wise work reads what it needs once and writes only
what is read later.
"""

import math
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from rayembed.models.adapters import adapted_linear
from rayembed_extras.estimates.model_sizes import batch_on_meta, kernels_on_meta

_aten = torch.ops.aten
_NOTHING = {  # neither read nor write
    _aten._unsafe_view.default,
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.detach.default,
}
_DRAWS = torch.ops.rayembed.draw_bits.default
_IN_PLACE = {_aten.addmm_.default: _aten.addmm}


def _grouped_flops(left, right, *_, out_val, **__):
    """Operations of products of groups, of which `left` or `right` holds one for each."""
    both = left.dim() == right.dim() == 3
    return 2 * math.prod(left.shape[-2:]) * right.shape[-1] * (len(left) if both else 1)


_FLOPS = ChainMap(flop_registry, {_aten._grouped_mm: _grouped_flops})  # as it grows
_OWN = {  # operations that are several kernels
    torch.ops.rayembed.adapted_linear.default: adapted_linear.computed,
    torch.ops.rayembed.adapted_linear_backward.default: adapted_linear.gradients,
}
_ATTENTION = {  # and whether it is a backward pass
    _aten._scaled_dot_product_flash_attention.default: False,
    _aten._scaled_dot_product_flash_attention_backward.default: True,
}
_INSTRUCTIONS = 816 / 64
"""Of a decision of dropout, as its kernel's code for sm_90 has them. Those that multiply and those
that do not may run beside each other, which is not assumed."""


@register_flop_formula(torch.ops.rayembed.kept_down)
def _of_down_product(x, bits, down, *_, out_shape=None, **__) -> int:
    return 2 * x[0] * x[1] * down[0]


@register_flop_formula(torch.ops.rayembed.kept_of_down)
def _of_gradient(of_thin, x, *_, out_shape=None, **__) -> int:
    return 2 * x[0] * x[1] * of_thin[1]


@register_flop_formula(torch.ops.rayembed.kept_of_input)
def _of_input_product(of_thin, down, *_, out_shape=None, **__) -> int:
    return 2 * of_thin[0] * down[0] * down[1]


@dataclass(frozen=True)
class Machine:
    """What a roofline assumes of a GPU; times are bytes or operations over these."""

    products: float = 700e12
    """FLOP/s that products in bfloat16 reach."""
    memory: float = 2.7e12
    """Bytes/s."""
    peak: float = 989e12
    """FLOP/s on the data sheet, of which shares are told."""
    masked_attention: tuple[float, float] = (150e12, 80e12)
    """FLOP/s of attention with a mask, forward and backward."""
    attention: tuple[float, float] = (300e12, 200e12)
    """The same without a mask or padding, by a flash kernel over texts of some hundred tokens."""
    kernel_seconds: tuple[float, float] = (80e-6, 40e-6)
    """Of the host for each kernel of a pass without gradient, and for each more of its backward
    pass. Beside an H200 75 to 90 microseconds of transformers' Python were measured forward. The
    backward pass, which C++ launches, is assumed: both passes of BERT base, 484 kernels, took 48 ms
    at most, tokenising among them, and here take 26. What a compiler fuses is one kernel of the
    same cost."""
    decision: float = _INSTRUCTIONS / 14.8e12
    """Seconds of a decision of dropout: 14.8e12 operations/s on whole numbers are those of 132
    multiprocessors with 64 lanes at 1.755 GHz."""
    gpu_bytes: float = 80e9
    in_node: float = 370e9
    """Bytes/s of a reduction over NVLink, as NCCL's bus bandwidth."""
    between_nodes: float = 320e9
    """The same over several nodes with 3,200 Gb/s each."""
    gpus_of_node: int = 8


@dataclass
class Counts:
    """What one pass does."""

    product_flops: float = 0.0
    product_seconds: float = 0.0
    """Each product takes as long as its operations or its bytes, whichever is longer."""
    bytes: float = 0.0
    """Read and written by all other operations, each for itself."""
    fused_bytes: float = 0.0
    """The same where everything between two products is one kernel."""
    attention_flops: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """Forward and backward, over tokens of the same text."""
    latent_flops: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """Forward and backward, over latents."""
    kernels: float = 0.0
    fused_kernels: float = 0.0
    """The same where everything between two products is one kernel."""
    decisions: float = 0.0
    """Of dropout that keeps bits."""

    def vector(self) -> np.ndarray:
        """All numbers in one array."""
        return np.array(
            [
                self.product_flops,
                self.product_seconds,
                self.bytes,
                self.fused_bytes,
                *self.attention_flops,
                *self.latent_flops,
                self.kernels,
                self.fused_kernels,
                self.decisions,
            ]
        )

    @classmethod
    def of(cls, values: np.ndarray) -> "Counts":
        """Counts of what `vector` gives."""
        return cls(*values[:4].tolist(), values[4:6], values[6:8], *values[8:].tolist())


class CountOnMeta(TorchDispatchMode):
    """Counts the operations that run below it on the meta device."""

    def __init__(self, machine: Machine, *, padded: bool) -> None:
        super().__init__()
        self.machine, self.padded = machine, padded
        self.counts = Counts()
        # So that no storage's number is given twice. The tensors themselves are not held: autograd
        # would copy gradients, which it otherwise keeps as they come.
        self._kept: list[torch.UntypedStorage] = []
        self._events: list[tuple[bool, list, list]] = []
        self._within = False
        """Whether an operation runs that a compiler takes as it is."""

    def _attended(self, query, key, *, backward):
        """Count an attention; a backward pass makes five products for the two of a forward one."""
        batch, heads, length, width = query.shape
        flops = 4.0 * batch * heads * length * key.shape[2] * width * (2.5 if backward else 1.0)
        over_text = length == key.shape[2]
        of = self.counts.attention_flops if over_text else self.counts.latent_flops
        of[int(backward)] += flops
        self.counts.kernels += 1
        self.counts.fused_kernels += 1
        self._events.append((True, [_part(query), _part(key)], []))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return not self.padded
        if func in _OWN:
            self._within = True
            with self:
                out = _OWN[func](*args, **kwargs)
            self._within = False
            return out
        out = func(*args, **kwargs)
        if func in _ATTENTION:
            backward = _ATTENTION[func]  # whose first argument is the output's gradient
            self._kept += [*args[:4], *out]
            self._attended(*args[backward : backward + 2], backward=backward)
            return out
        if func in _NOTHING or (_is_view(func) and _shares(args[0], out)):
            self._kept += [
                x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)
            ]
            return out
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self._kept += [x.untyped_storage() for x in (*read, *written)]
        moved = sum(map(_bytes, read)) + sum(map(_bytes, written))
        of_product = _FLOPS.get(_IN_PLACE.get(func, func._overloadpacket))
        product = of_product is not None
        if of_product is not None:
            flops = of_product(*args, **kwargs, out_val=out)
            self.counts.product_flops += flops
            machine = self.machine
            self.counts.product_seconds += max(flops / machine.products, moved / machine.memory)
        else:
            self.counts.bytes += moved
            self.counts.fused_bytes += moved if self._within else 0
            self.counts.decisions += args[1] * args[2] if func is _DRAWS else 0
        alone = product or self._within
        self.counts.kernels += 1
        self.counts.fused_kernels += alone
        self._events.append((alone, [*map(_part, read)], [*map(_part, written)]))
        return out

    def finished(self) -> Counts:
        """The counts, when the pass is over."""
        last_read: dict[int, int] = {}
        for place, (_, read, _) in enumerate(self._events):
            last_read.update((storage, place) for storage, *_ in read)
        start = 0
        for place in range(len(self._events) + 1):
            if place == len(self._events) or self._events[place][0]:
                self.counts.fused_bytes += self._of_region(start, place, last_read)
                self.counts.fused_kernels += place > start
                start = place + 1
        return self.counts

    def _of_region(self, start: int, end: int, last_read: dict[int, int]) -> float:
        """Bytes that events from start to before end read from outside or leave for later."""
        outside: dict[int, dict] = {}
        made: dict[int, int] = {}
        limit: dict[int, int] = {}
        for _, read, written in self._events[start:end]:
            for storage, whole, view, amount in read:
                limit[storage] = whole
                if storage not in made:
                    outside.setdefault(storage, {})[view] = amount
            for storage, whole, _, amount in written:
                limit[storage] = whole
                made[storage] = made.get(storage, 0) + amount
        reads = sum(min(sum(views.values()), limit[s]) for s, views in outside.items())
        # What nobody reads any more leaves the pass: gradients and embeddings.
        left = [s for s in made if last_read.get(s, math.inf) >= end]
        return reads + sum(min(made[s], limit[s]) for s in left)


def _is_view(func) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _shares(source, out) -> bool:
    """Whether what may be a view is one, and no copy in another type."""
    whose = source.untyped_storage()._cdata
    return all(x.untyped_storage()._cdata == whose for x in tree_leaves(out))


def _bytes(tensor) -> int:
    """Bytes of a tensor; what is expanded counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _part(tensor):
    """Storage, its bytes, which part of it, and the bytes of that part."""
    storage = tensor.untyped_storage()
    view = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
    return storage._cdata, storage.nbytes(), view, _bytes(tensor)


def count_pass(model, texts, tokens, machine, *, gradient: bool, padded: bool) -> Counts:
    """Counts of one micro-batch's forward pass, or of forward and backward pass.

    Args:
        model: on the meta device, in training mode.
        padded: whether a text is shorter than the longest, so that there is a mask.
    """
    model.zero_grad(set_to_none=True)
    mode = CountOnMeta(machine, padded=padded)
    with kernels_on_meta(), torch.set_grad_enabled(gradient):
        batch = batch_on_meta(texts, tokens)
        with mode:
            found = model(batch)
            if gradient:
                found.backward()
    return mode.finished()


class PassCosts:
    """Counts of a pass of any number of texts and length, from a few that are counted.

    Everything is a sum of a constant and multiples of texts, tokens, and pairs of tokens within
    texts, and of a head and equal layers; so four shapes at one layer and at two give the rest.
    """

    SHAPES = ((4, 256), (8, 256), (4, 512), (16, 128))

    def __init__(self, build, layers: int, machine: Machine, **how) -> None:
        """Count.

        Args:
            build: makes the model on the meta device with this number of layers.
            layers: of the whole model.
            how: `gradient` and `padded` of `count_pass`.
        """
        tables = []
        for number in (1, 2):
            model = build(number)
            rows = [count_pass(model, *shape, machine, **how).vector() for shape in self.SHAPES]
            tables.append(np.stack(rows))
        whole = tables[0] + (layers - 1) * (tables[1] - tables[0])
        terms = [[1, b, b * t, b * t * t] for b, t in self.SHAPES]
        self._solved = np.linalg.solve(np.array(terms), whole)

    def of(self, lengths: Sequence[int]) -> Counts:
        """Counts of a micro-batch of texts of these lengths: equal ones, or without padding."""
        tokens = np.asarray(lengths, dtype=float)
        terms = np.array([1.0, len(tokens), tokens.sum(), (tokens**2).sum()])
        return Counts.of(terms @ self._solved)
