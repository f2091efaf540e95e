"""What a step under DeepSpeed waits for, on a CPU whose accelerator says that it is none.

DeepSpeed's accelerator for CPUs says that each operation is over when its call returns, and much is
left out for it. Here it says no, as a GPU's does, and its streams and events count who waits for
them. Reads of tensors are counted whatever they read: a step has none but those of its list.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rayembed

_FOLDERS = [Path(package.__file__).parent for package in (rayembed, deepspeed)]

_SIZED_BY_VALUES = ("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive")
"""Operations whose results are as large as values say."""


class Waits(TorchDispatchMode):
    """Counts by kind and by the innermost line of rayembed or DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.places: Counter[str] = Counter()

    def count(self, kind: str) -> None:
        frames = [
            f"{Path(frame.filename).name}:{frame.name}"
            for frame in traceback.extract_stack()
            if any(Path(frame.filename).is_relative_to(folder) for folder in _FOLDERS)
        ]
        self.kinds[kind] += 1
        self.places[f"{kind}, {frames[-1] if frames else 'elsewhere'}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" or name in _SIZED_BY_VALUES:
            self.count("a value")
        return func(*args, **(kwargs or {}))


class _Stream:
    """A stream or an event; also what `Stream()` makes of one."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __call__(self, *_, **__) -> "_Stream":
        return self

    def synchronize(self) -> None:
        self._waits.count("a stream")

    def wait_stream(self, *_) -> None:
        """A stream waits, and no host."""

    wait_event = record = wait_stream

    def query(self) -> bool:
        return False


@contextmanager
def engine_waits(patch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Counts the waits of steps within; engines that take part are made within as well."""
    waits, accelerator = Waits(), get_accelerator()
    stream, of_cpu = _Stream(waits), type(accelerator)
    with patch.context() as within:
        for name in ("is_synchronized_device", "resolves_data_dependency"):
            within.setattr(of_cpu, name, lambda _: False)
        within.setattr(of_cpu, "handles_memory_backpressure", lambda _: False)
        within.setattr(of_cpu, "synchronize", lambda *_: waits.count("the device"))
        within.setattr(of_cpu, "Stream", stream)
        within.setattr(of_cpu, "Event", stream)
        within.setattr(of_cpu, "stream", lambda *_: nullcontext())
        within.setattr(of_cpu, "current_stream", lambda *_: stream)
        within.setattr(of_cpu, "default_stream", lambda *_: stream)
        within.setattr(Tensor, "record_stream", lambda *_: None)
        for name in ("cpu", "numpy", "tolist"):
            within.setattr(Tensor, name, _counted(getattr(Tensor, name), waits, f".{name}()"))
        with waits:
            yield waits


def _counted(method, waits, kind):
    def call(*args, **kwargs):
        waits.count(kind)
        return method(*args, **kwargs)

    return call
