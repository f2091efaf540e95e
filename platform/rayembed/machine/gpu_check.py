"""Check that a node's driver and GPU support training, before data is prepared.

The facts are taken in a task on the node, and judged where the run starts. Knows no Ray.
"""

import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rayembed.machine.device import SeenGpus, gpus_here

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""File of NVIDIA's kernel module; a container sees its node's."""

_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""Major version of CUDA → minimum driver on Linux for all its minor versions (NVIDIA's CUDA
compatibility guide, table of minor version compatibility)."""

_AMPERE = (8, 0)

_WIDTH = 256
_TOLERANCE = 0.02
"""Largest relative error of a sum of 256 products of ones and halves, which bfloat16 holds
exactly."""


@dataclass(frozen=True)
class GpuFacts:
    """What a node reports about its first GPU: names, versions, and the result of a test
    computation.
    """

    node: str
    torch: str
    """Version of torch, with its build: `2.13.0+cu130`."""
    cuda: str | None
    """CUDA version that torch is built with, `13.0`; None: it is a build without."""
    driver: str | None
    """Version of NVIDIA's driver, `580.65.06`; None: there is none, or a sandbox hides its file."""
    gpu: str | None = None
    """Name of the GPU; None: torch sees none."""
    error: str | None = None
    """Error of a small product on the GPU, or the reason why torch sees no GPU; None: the product
    was right."""


def gpu_facts() -> GpuFacts:
    """Read driver, CUDA and GPU of this machine, and test the first GPU with a small matrix
    product.
    """
    about = socket.gethostname(), torch.__version__, torch.version.cuda, _driver()
    try:
        name = torch.cuda.get_device_name()
        error = product_error("cuda", bf16=torch.cuda.get_device_capability() >= _AMPERE)
    except (RuntimeError, AssertionError) as caught:  # AssertionError: a build without CUDA
        return GpuFacts(*about, None, _first_line(caught))
    return GpuFacts(*about, name, error)


def product_error(device: str, *, bf16: bool = True) -> str | None:
    """Compute a small matrix product on the device and return an error or a wrong result as text;
    None if it was right.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    try:
        left = torch.full((_WIDTH, _WIDTH), 0.5, dtype=dtype, device=device)
        found = (left @ torch.ones_like(left)).float()
    except RuntimeError as error:
        return _first_line(error)
    wrong = float((found - _WIDTH / 2).abs().max().cpu())
    if wrong > _TOLERANCE * _WIDTH:
        return f"a product of {_WIDTH} x {_WIDTH} in {dtype} is off by {wrong:g}"
    return None


def usable_gpus_here() -> SeenGpus:
    """Return the GPUs that torch sees on this machine, with the problem if it sees none although
    NVIDIA's driver is installed.
    """
    seen = gpus_here()
    if not seen.number and (facts := gpu_facts()).driver is not None:
        return replace(seen, problem=gpu_problem(facts, is_here=True) or "")
    return seen


def gpu_problem(facts: GpuFacts, *, is_here: bool = False) -> str | None:
    """Describe why a node's GPU cannot train, and the remedy; None if it can train.

    Args:
        is_here: whether the node is this machine, without a cluster.
    """
    who = f"node {facts.node}"
    if facts.cuda is None:
        advice = (
            "install torch's CUDA build"
            if is_here
            else "start the node from the image for GPUs (EXTRA=gpu)"
        )
        return f"{who} has torch {facts.torch}, a build without CUDA; {advice}"
    if facts.driver is None and facts.error is None:
        return None
    if facts.driver is None:
        return (
            f"{who} has no NVIDIA driver (no {_DRIVER_FILE}); install the driver and NVIDIA's "
            f"container toolkit there{_or_without(is_here)}"
        )
    least = _DRIVERS.get(int(facts.cuda.partition(".")[0]))
    if least is not None and _numbers(facts.driver) < least:
        needed = ".".join(f"{number:02d}" for number in least)
        fits = max((m for m, d in _DRIVERS.items() if d <= _numbers(facts.driver)), default=None)
        other = ""
        if fits is not None and is_here:
            other = f", or install torch for CUDA {fits}"
        elif fits is not None:
            other = (
                f", or build the image with torch for CUDA {fits} "
                "(--build-arg TORCH_INDEX=…, cluster/docker/README.md)"
            )
        return (
            f"{who} has NVIDIA driver {facts.driver}, and torch {facts.torch} is built with CUDA "
            f"{facts.cuda}, which needs driver {needed} or later; update the node's driver{other}"
        )
    if facts.error is not None:
        gpu = facts.gpu or "a GPU that torch cannot use"
        return (
            f"{who} (driver {facts.driver}, torch {facts.torch}, {gpu}) fails at a small product: "
            f"{facts.error}; look at `nvidia-smi` there, reset the GPU{_or_without(is_here)}"
        )
    return None


def _or_without(is_here: bool) -> str:
    return "" if is_here else ", or take the node out"


def _driver() -> str | None:
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return driver_in(text)


def driver_in(text: str) -> str | None:
    """Extract the driver version from the text of NVIDIA's version file; None if the text has no
    version.
    """
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
