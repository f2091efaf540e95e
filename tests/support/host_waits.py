"""What of a training step the host of a GPU would wait for, counted on the meta device.

Tensors on the meta device stand for those on a GPU, tensors on the CPU are the host's. A meta
tensor has no values, so that what asks for one is counted here or fails. What a kernel does within
is not seen.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rayembed
from rayembed.models.attention import unpadded, varlen

META = torch.device("meta")
COPY_TO_HOST, COPY_TO_DEVICE, VALUE = "copy to the host", "copy to the device", "a value"

_FOLDERS = [Path(package.__file__).parent for package in (rayembed, transformers)]
"""Whose lines are named."""

_aten = torch.ops.aten


def _flat(x, *_, **__):
    return x.flatten(), x.flatten(), x.flatten()


_SIZED_BY_VALUES = {
    _aten.nonzero.default: lambda x: x.new_empty(x.numel(), x.dim(), dtype=torch.int64),
    _aten.masked_select.default: lambda x, mask: x.new_empty(mask.numel()),
    _aten.bincount.default: lambda x, weights=None, number=0: x.new_empty(number, dtype=x.dtype),
    _aten._unique2.default: _flat,
    _aten.unique_dim.default: _flat,
    _aten.unique_consecutive.default: _flat,
}
"""Operations whose results are as large as values say, and a result of some size."""

_BY_INDICES = ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put")

_WITHOUT_META = {
    "segment_reduce": lambda x, *_, offsets, **__: x.new_empty(len(offsets) - 1, *x.shape[1:]),
    "_segment_reduce_backward": lambda grad, output, x, *_, **__: torch.empty_like(x),
}
"""Operations that ask for nothing and that the meta device lacks."""


class HostWaits(TorchDispatchMode):
    """Counts what the host would wait for while operations run below it."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        """Waits by kind."""
        self.places: Counter[str] = Counter()
        """The same by kind and line."""
        self.copies = 0
        """Copies to the device from pinned memory, for which nobody waits."""
        self._pinned: list[Tensor] = []

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor in memory that counts as pinned."""
        self._pinned.append(tensor.clone())
        return self._pinned[-1]

    def wait(self, kind: str) -> None:
        """Count a wait of the line that is running."""
        frames = [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if any(Path(frame.filename).is_relative_to(folder) for folder in _FOLDERS)
        ]
        self.kinds[kind] += 1
        self.places[f"{kind}, {frames[-1] if frames else 'elsewhere'}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func in (_aten._to_copy.default, _aten.copy_.default):
            return self._copied(func, args, kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(x.device == META for x in given):
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            self.wait(VALUE)
            return args[0].dtype != torch.bool  # not all tokens are text: there is padding
        if func in _SIZED_BY_VALUES:
            self.wait(name)
            func = _SIZED_BY_VALUES[func]
        elif name in _BY_INDICES:
            args = (args[0], self._indices(args[1]), *args[2:])
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait(name)
            kwargs["output_size"] = args[0].numel()
        elif func is _aten.masked_scatter_backward.default:
            self.wait("masked_select")  # which it is made of
        elif func is _aten.equal.default:
            self.wait(name)
            return True
        return _WITHOUT_META.get(name, func)(*args, **kwargs)

    def _indices(self, given):
        """Indices without masks, which count as true wherever they stand."""
        found = []
        for x in given:
            if x is None or x.dtype not in (torch.bool, torch.uint8):
                if x is not None and x.device != META:
                    self.wait(COPY_TO_DEVICE)
                found.append(x)
                continue
            self.wait("index by a mask")
            found += [torch.empty(x.numel(), dtype=torch.int64, device=META)] * x.dim()
        return found

    def _copied(self, func, args, kwargs):
        onto = func is _aten.copy_.default
        source = args[1] if onto else args[0]
        target = args[0].device if onto else torch.device(kwargs.get("device") or source.device)
        if target == source.device:
            return func(*args, **kwargs)
        if target != META:
            self.wait(COPY_TO_HOST)
            made = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return args[0].copy_(made) if onto else made
        held = any(source.untyped_storage().data_ptr() == x.data_ptr() for x in self._pinned)
        if held and (kwargs.get("non_blocking") or (onto and len(args) > 2 and args[2])):
            self.copies += 1
        else:
            self.wait(COPY_TO_DEVICE)
        return func(*args, **kwargs)


@contextmanager
def packs_on_meta(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models with `unpadded=always` pack on the meta device, as far as shapes go."""

    def attended(query, key, value, *_):
        return query + (key.mean() + value.mean()).to(query.dtype)

    with patch.context() as within:
        within.setattr(unpadded, "_why_padded", lambda _: None)
        within.setattr(varlen, "reference", attended)
        yield


@contextmanager
def host_waits(patch: pytest.MonkeyPatch) -> Iterator[HostWaits]:
    """Counts the waits within; what is pinned within counts as pinned."""
    waits, made = HostWaits(), torch.tensor

    def pin_memory(tensor):
        return waits.pin(tensor)

    def tensor(data, **settings):
        # Torch makes it without an operation that a mode would see.
        if torch.device(settings.get("device") or "cpu") == META:
            waits.wait(COPY_TO_DEVICE)
        return made(data, **settings)

    with patch.context() as within:
        within.setattr(torch, "tensor", tensor)
        within.setattr(Tensor, "pin_memory", pin_memory)
        with waits:
            yield waits
