"""Memory that operations take, counted tensor by tensor, on any device."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's base
    """Context that counts the bytes of tensors which operations inside it make.

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
