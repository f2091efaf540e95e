"""Number types (dtypes) that this machine computes fast; all other modules get their default dtype
from here.

Processors without units for bfloat16 emulate it, ten to a hundred times slower than float32
(benchmarks/log), and say so nowhere. So `dtype: auto` is settled by a look at the GPU, or by timing
one small product on the CPU, which also sees what `ONEDNN_MAX_CPU_ISA` or a virtual machine hides.
"""

import gc
import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from rayembed.config.backbone import Dtype, DtypeSetting

logger = logging.getLogger(__name__)

_AMPERE = (8, 0)
"""Compute capability from which NVIDIA's GPUs support bfloat16."""

_SMALL = (128, 384, 384)
"""Rows, inner width and columns of a small layer over a few texts, 38 MFLOP."""

_LAYER = (1024, 576, 1536)
"""Rows, inner width and columns of a larger layer over a micro-batch, 1.8 GFLOP."""

_ROUNDS = 3

_CPU_BUDGET = 1024
_GPU_BUDGET = 8192
_GPU_MOST = 131_072
"""Tokens of a forward pass above which a GPU does not get faster, for any model."""
_SHARE_OF_A_PASS = 0.25
"""Share of the room for graphs that a forward pass may take: GradCache always finds room for it."""

_CPU_PASS = 48
"""all-MiniLM-L6-v2 in float32, fitted to passes of 128 to 1,024 tokens: 50 in training, 26 in
encoding (benchmarks/log)."""

_GPU_PASS = 3.5e12
"""Parameters times tokens that a GPU computes while the host launches a pass of a small encoder: 16
ms for the 175 kernels of BERT base's forward pass beside an H200 (80 to 90 microseconds of Python
for each, benchmarks/log), at 400 TFLOP/s. A 7B LLM has ten times the kernels, but hides their
launches behind its products; 500 of its tokens stand for what the GPU itself loses in a pass."""
_GPU_PASS_RANGE = (256, 16_384)

_GPU_FLOPS = 4e14
"""Useful FLOP/s of a GPU in training: half of an H100's peak in bfloat16."""

_TOKENS_OF_A_PROCESS = 250_000
"""Tokens per second that one process produces from texts: 400,000 to 450,000 in a second of a core
of EPYC Turin (`benchmarks/input_speed.py`), of which beside other work it gets a part."""

_STEP_PROCESSES = range(2, 5)

_CORES_OF_A_PROCESS = 4
"""Number of cores for each worker that justify a further process."""

_CONTAINER = Path("/sys/fs/cgroup")

_CONTAINER_MEMORY = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Files of a container's limit, use and table of uses, in the second and the first form of cgroups.
"""


_RAN_OUT = re.compile(
    r"cuda[^\n]*out of memory|_ALLOC(ATION)?_FAILED|failed to cuda \w*alloc", re.IGNORECASE
)
"""Texts of out-of-memory errors that have no torch class of their own: of CUDA and Triton (`CUDA
error: out of memory`), cuBLAS and cuDNN (`CUBLAS_STATUS_ALLOC_FAILED`), NCCL (`Cuda failure 2 'out
of memory'`)."""


@dataclass(frozen=True)
class Precision:
    """A number type for weights and activations, with the reason for its choice."""

    dtype: Dtype
    why: str
    """Reason, as the end of a sentence: `this CPU emulates bfloat16 (…)`."""

    def __str__(self) -> str:
        return f"{self.dtype}: {self.why}"


def default_device() -> str:
    """Return `cuda` where torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def auto_precision(device: str | None = None) -> Precision:
    """Choose the number type that a dtype setting of `auto` stands for on this machine.

    bfloat16 where the processor has units for it (GPUs of compute capability 8.0 and later; CPUs on
    which a product in it is faster than in float32), float32 elsewhere.

    Args:
        device: `cuda`, `cuda:1`, `cpu`; None: the GPU where torch sees one, else the CPU. Of GPUs
            of other machines bfloat16 is expected.
    """
    device = device or default_device()
    if device.startswith("cuda") and not torch.cuda.is_available():
        return Precision("bfloat16", "there is no GPU here to check; all since Ampere support it")
    if device.startswith("cuda"):
        name, capability = _gpu(device)
        version = ".".join(map(str, capability))
        if capability >= _AMPERE:
            return Precision("bfloat16", f"this GPU ({name}) has units for it")
        return Precision("float32", f"this GPU ({name}, {version}) has no units for bfloat16")
    speed = bfloat16_speed()
    if speed >= 1:
        return Precision("bfloat16", f"this CPU has units for it ({speed:.1f} times float32)")
    return Precision("float32", f"this CPU emulates bfloat16 ({1 / speed:.0f} times slower)")


def settled(asked: DtypeSetting, on: Precision | str | None = None) -> Dtype:
    """Return the number type of a setting: for `auto` the type that this machine computes fast,
    else the type that is set.

    Says once in a process what `auto` became and why. Whoever asks for bfloat16 where it is
    emulated is warned, with the measured factor.

    Args:
        on: the answer of the machine that will compute, or a device of this one as in
            `auto_precision`.
    """
    if asked == "float32":
        return asked
    precision = _answer(on)
    if asked == "auto":
        say_once(logging.INFO, str(precision))
        return precision.dtype
    if precision.dtype != asked:
        say_once(
            logging.WARNING,
            f"{asked} was asked for, but {precision.why}; {precision.dtype} or auto is faster",
        )
    return asked


@contextmanager
def rounded_products(dtype: str, device: str) -> Iterator[None]:
    """On a GPU, compute float32 matrix products in TF32 inside the block if `dtype` is `tf32`;
    otherwise change nothing.

    They are exact by default: scores and vectors are then those of any other device.

    Args:
        dtype: `tf32`, or another type, for which nothing changes.
    """
    if dtype != "tf32" or not device.startswith("cuda"):
        yield
        return
    with float32_products("high"):
        yield


@contextmanager
def float32_products(precision: Literal["high", "highest"]) -> Iterator[None]:
    """Set torch's precision of float32 matrix products inside the block, and restore it
    afterwards.

    Where the process has used torch's newer interface too, the older one cannot always be read, but
    can be set; what the newer one said is put back.
    """
    parts = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    own = [part.fp32_precision for part in parts]
    before = None
    with suppress(RuntimeError):
        before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for part, value in zip(parts, own, strict=True):
            if part.fp32_precision != value:
                part.fp32_precision = value


@lru_cache
def say_once(level: int, message: str) -> None:
    """Log a message once in each process."""
    logger.log(level, message)


def wide_enough(saved: Dtype, on: Precision | str | None = None) -> Dtype:
    """Return the number type in which to load saved weights: as saved, or float32 where this
    machine only emulates bfloat16.

    Every bfloat16 is a float32, so the weights stay what they are, and so do their fingerprints.

    Args:
        on: as in `settled`.
    """
    if saved != "bfloat16" or (precision := _answer(on)).dtype == saved:
        return saved
    say_once(logging.INFO, f"weights saved in {saved} are computed in {precision}")
    return precision.dtype


def _answer(on: Precision | str | None) -> Precision:
    return on if isinstance(on, Precision) else auto_precision(on)


@lru_cache
def bfloat16_speed() -> float:
    """Measure the speed of bfloat16 matrix products relative to float32 on this CPU; cached."""
    return _seconds(torch.float32, _SMALL) / _seconds(torch.bfloat16, _SMALL)


@lru_cache
def product_speed(dtype: Dtype) -> float:
    """Measure the FLOP/s of a matrix product as large as a model layer's, on one core of
    this CPU.
    """
    return 2 * math.prod(_LAYER) / _seconds(getattr(torch, dtype), _LAYER)


def _seconds(dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """Run a matrix product several times on one thread and return the fastest time in CPU seconds,
    which other processes do not affect.
    """
    rows, inner, columns = shape
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    fastest, threads = math.inf, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for _ in range(_ROUNDS):
                began = time.thread_time()
                left @ right
                fastest = min(fastest, time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return fastest


def free_memory(device: str) -> int:
    """Return the free bytes: for a CPU within the container's limit, for a GPU including what torch
    has cached.
    """
    if device.startswith("cuda"):
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + kept
    import psutil

    free: int = psutil.virtual_memory().available
    for names in _CONTAINER_MEMORY:
        try:
            limit, used, table = ((_CONTAINER / name).read_text() for name in names)
        except OSError:
            continue
        # Files that were read long ago are counted as used, and given up when memory is asked for.
        files = dict(line.split() for line in table.splitlines()).get("inactive_file", 0)
        if limit.strip().isdigit():
            free = min(free, max(0, int(limit) - int(used) + int(files)))
    return free


def total_memory() -> int:
    """Return the total memory of the current GPU in bytes."""
    return torch.cuda.mem_get_info()[1]


def device_label(device: str) -> str:
    """Return name and memory of the current GPU as text; `CPU` for CPUs."""
    if not device.startswith("cuda"):
        return "CPU"
    return f"{torch.cuda.get_device_name()} of {total_memory() / 2**30:.1f} GiB"


def ran_out(error: BaseException) -> bool:
    """Whether an error means that a GPU's memory is exhausted; all other modules use this
    function.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _RAN_OUT.search(str(error)) is not None


def release_memory() -> None:
    """Collect garbage and return torch's unused cached GPU memory to the driver, so that other
    processes can use it.
    """
    gc.collect()
    torch.cuda.empty_cache()  # nothing where no GPU is in use


def memory_in_use(device: str) -> str:
    """Describe the memory use of the current GPU according to torch and the driver; for a CPU, the
    free memory.
    """
    gib = 2**30
    if not device.startswith("cuda"):
        return f"{free_memory(device) / gib:.2f} GiB are free"
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.memory_allocated() / gib:.2f} GiB are allocated, "
        f"{torch.cuda.memory_reserved() / gib:.2f} reserved by torch, and {free / gib:.2f} of "
        f"{total / gib:.2f} free"
    )


def micro_batch_tokens(device: str) -> int:
    """Return the default number of tokens, padding included, in one forward pass of training; see
    also `packed_tokens`.

    On CPUs what their caches hold: 512 to 2,048 were within a tenth of each other (benchmarks/log).
    """
    return _GPU_BUDGET if device.startswith("cuda") else _CPU_BUDGET


def packed_tokens(room: float, of_token: float) -> int:
    """Choose the tokens of an unpadded forward pass on a GPU by its free memory: a multiple of
    8,192 up to 131,072.

    A small encoder's pass of 8,192 tokens takes longer to launch than to compute (benchmarks/log).

    Args:
        room: bytes that graphs may take; a pass takes a quarter of it at most.
        of_token: bytes of a token's graph.
    """
    multiple = int(_SHARE_OF_A_PASS * room / of_token) // _GPU_BUDGET
    return min(max(multiple, 1) * _GPU_BUDGET, _GPU_MOST)


def pass_cost_tokens(device: str, model: nn.Module) -> int:
    """Return the fixed cost of a forward pass (launching kernels, reading weights), as a number of
    tokens that take as long to compute.

    Its kernels are launched, its weights read and, in training, gradients of all of them added.
    On a GPU the launches take about as long for every encoder, in which a small one computes more
    tokens.
    """
    if not device.startswith("cuda"):
        return _CPU_PASS
    least, most = _GPU_PASS_RANGE
    parameters = max(1, sum(parameter.numel() for parameter in model.parameters()))
    return int(min(max(_GPU_PASS / parameters, least), most))


def step_processes(device: str, model: nn.Module, cores: float) -> int:
    """Choose how many processes make each worker's batches; 0 means a thread of the worker.

    A thread where it is fast enough: a step on CPUs takes a hundred times as long as its
    tokenisation, and a GPU reads few tokens a second of a large model.

    Args:
        cores: of this machine for each of its workers.
    """
    if not device.startswith("cuda") or cores < _STEP_PROCESSES[0]:
        return 0
    parameters = max(1, sum(parameter.numel() for parameter in model.parameters()))
    tokens = _GPU_FLOPS / (6 * parameters)  # a second; two FLOP forward, four backward
    if tokens < _TOKENS_OF_A_PROCESS / 4:  # which the thread spends a quarter of its time on
        return 0
    wanted = min(math.ceil(tokens / _TOKENS_OF_A_PROCESS), int(cores / _CORES_OF_A_PROCESS))
    return min(max(wanted, _STEP_PROCESSES[0]), _STEP_PROCESSES[-1])


def _gpu(device: str) -> tuple[str, tuple[int, int]]:
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
