"""Inductor's Triton kernels of a compiled model, made for a GPU that is not there, as cubins.

The model runs on fake tensors (`fake_cuda`); what would launch kernels ends the call.
"""

import re
import subprocess
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch._dynamo.device_interface as interfaces
import triton
from torch._functorch import config as functorch_config
from torch._inductor import async_compile, scheduler
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import unset_fake_temporarily
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_Properties = namedtuple(
    "_Properties",
    "name major minor multi_processor_count warp_size max_threads_per_multi_processor "
    "regs_per_multiprocessor total_memory shared_memory_per_block_optin "
    "shared_memory_per_multiprocessor L2_cache_size max_threads_per_block gcnArchName",
)

_SIZES = {
    (9, 0): (132, 232_448, 233_472, 50 << 20),
    (8, 0): (108, 166_912, 167_936, 40 << 20),
}
"""Multiprocessors, shared memory of a block and of a multiprocessor, L2 cache of H100 and A100."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    name: str
    architecture: str
    """What it is compiled for, `sm_90`."""
    registers: int
    spilled: int
    """Bytes of local memory a thread."""
    shared: int
    """Bytes of shared memory a block."""


class _NoLaunchError(BaseException):
    """Raised where the generated code begins to launch kernels."""


@contextmanager
def _compiler_of(capability: tuple[int, int], made: dict[str, str]) -> Iterator[None]:
    processors, block, shared, cache = _SIZES[capability]
    properties = _Properties(
        *("fake", *capability, processors, 32, 2048, 65_536, 80 << 30),
        *(block, shared, cache, 1024, ""),
    )
    number = 10 * capability[0] + capability[1]

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", number, 32)

        def get_current_device(self):
            return 0

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

    class NoGuard:
        def __init__(self, *_) -> None:
            raise _NoLaunchError

    def keep(self, kernel_name, source_code, device_str="cuda"):
        made[kernel_name] = source_code

    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        inductor_config.patch(
            force_disable_caches=True,
            joint_graph_constant_folding=False,  # which computes constants
            use_static_cuda_launcher=False,  # which keeps no cubin
        ),
        pytest.MonkeyPatch.context() as patch,
    ):
        kind = interfaces.CudaInterface
        for owner in (kind, kind.Worker):
            patch.setattr(owner, "get_device_properties", staticmethod(lambda d=None: properties))
            patch.setattr(owner, "current_device", staticmethod(lambda: 0))
        for name, answer in {
            "get_compute_capability": number,
            "is_available": True,
            "device_count": 1,
            "is_bf16_supported": True,
            "is_triton_capable": True,
            "raise_if_triton_unavailable": None,
            "exchange_device": 0,
            "maybe_exchange_device": 0,
        }.items():
            patch.setattr(kind, name, staticmethod(lambda *_, answer=answer, **__: answer))
        patch.setattr(torch.cuda, "get_device_properties", lambda d=None: properties)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "_DeviceGuard", NoGuard)
        patch.setattr(scheduler, "has_triton", lambda *_: True)
        patch.setattr(async_compile.AsyncCompile, "triton", keep)
        patch.setattr(async_compile.AsyncCompile, "wait", lambda *_: None)
        patch.setattr(triton.runtime.driver, "_active", Driver())
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        yield


def kernels_of(call: Callable[[], object], capability: tuple[int, int]) -> list[Kernel]:
    """Kernels of forward and backward graphs that a call compiles, inside of `fake_gpu`."""
    sources: dict[str, str] = {}
    torch._dynamo.reset()
    DeviceProperties.create.cache_clear()
    with _compiler_of(capability, sources):
        with suppress(_NoLaunchError):
            call()
        with unset_fake_temporarily():
            return [_compiled(name, source) for name, source in sources.items()]


def compiled(
    kernel: object, types: dict[str, str], constants: dict[str, int], capability: tuple[int, int]
) -> Kernel:
    """A kernel of Triton's own language as a cubin.

    Args:
        types: of arguments by name, as Triton writes them; tensors and whole numbers are multiples
            of 16.
        constants: by name.
    """
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
               if types.get(name, "fp32") != "fp32"}  # fmt: skip
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    made = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target)
    return _measured(kernel.__name__, made.asm)


def _compiled(name: str, source: str) -> Kernel:
    tuner = getattr(PyCodeCache.load(source), name)
    # The first of the ways to cut it that a GPU would time.
    tuner.precompile(warm_cache_only=True)  # as inductor's own processes without a GPU do
    return _measured(name, tuner.compile_results[0].kernel.asm)


def _measured(name: str, made: dict) -> Kernel:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        asked = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    numbers = {
        key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", told)
    }
    return Kernel(
        name,
        re.search(r"\.target (sm_\d+)", made["ptx"])[1],
        numbers["REG"],
        numbers["STACK"] + numbers["LOCAL"],
        numbers["SHARED"],
    )
