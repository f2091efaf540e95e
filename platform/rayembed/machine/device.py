"""Choice between GPU and CPU where a placement leaves it open, and settings of torch for that
device.

`use_gpu: auto` is settled once, where a job starts, by the machines that will compute; the answer
stands in the job's records.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rayembed.config.placement import is_kind
from rayembed.config.settings import Settings
from rayembed.config.types import UseGpu
from rayembed.errors import PlacementError

logger = logging.getLogger(__name__)

_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Names of the settings of torch's allocator on GPUs, the new and the old one."""

_GROWING = "expandable_segments:True"

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_DETERMINISTIC = ":4096:8"
"""Workspace setting that makes cuBLAS deterministic (24 MiB), from torch's documentation."""

_NOT_DETERMINISTIC = ("does not have a deterministic implementation", CUBLAS)
"""Parts of torch's error messages about non-deterministic operations."""

Placed = TypeVar("Placed", bound=Settings)


@dataclass(frozen=True)
class SeenGpus:
    """Number of usable GPUs on the machines that will compute, with a description for messages."""

    number: int
    text: str
    """GPUs that were detected, as a clause: `torch 2.13.0+cpu sees no GPU on this machine`."""
    problem: str = ""
    """Reason why an existing GPU cannot be used, with a remedy; empty: nothing is wrong."""


def settled_gpu(
    asked: UseGpu,
    seen: SeenGpus,
    setting: str,
    *,
    waits: bool = False,
    needed: int = 1,
    users: str = "workers",
) -> bool:
    """Return whether to use GPUs; log the reason where the setting is `auto`, and warn where it
    leaves GPUs unused.

    Args:
        asked: the setting's value.
        setting: its full path.
        waits: whether the job waits for nodes that are still to come.
        needed: GPUs that the job needs; with fewer `auto` means CPUs.
        users: noun of what needs a GPU each.

    Raises:
        PlacementError: GPUs are asked for and none can be used, some can and others cannot, or
            `auto` cannot be decided because nodes are still to come.
    """
    if asked is False:
        if seen.number:
            logger.warning("%s=false: computing on CPUs, although %s", setting, seen.text)
        return False
    if asked is True and not seen.number and not waits:
        why = (
            f"no GPU can be used: {seen.problem}"
            if seen.problem
            else f"no node has a GPU: {seen.text}"
        )
        raise PlacementError(
            f"{setting} is true, but {why}. Set {setting}=false, or run on a machine with a GPU"
        )
    if asked is True or seen.number >= max(1, needed) or (seen.number and waits):
        if seen.problem and not waits:
            raise PlacementError(
                f"{setting} is {str(asked).lower()}, but not all GPUs can be used: {seen.problem}; "
                f"or compute on CPUs ({setting}=false)"
            )
        if asked == "auto":
            logger.info("%s=auto resolves to true: %s", setting, seen.text)
        return True
    if waits:
        raise PlacementError(
            f"{setting}=auto cannot be decided yet: at present {seen.text}, but other nodes "
            f"may join during placement.wait_for_nodes_seconds. Set {setting}=true to wait "
            f"for GPUs, or {setting}=false to compute on CPUs"
        )
    if seen.problem:
        logger.warning(
            "%s=auto resolves to false because the GPU cannot be used: %s", setting, seen.problem
        )
    elif seen.number:
        logger.warning(
            "%s=auto resolves to false because there are too few GPUs (%s): %d %s need one "
            "GPU each",
            *(setting, seen.text, needed, users),
        )
    else:
        logger.info("%s=auto resolves to false: %s", setting, seen.text)
    return False


def settled_placement(placement: Placed, seen: SeenGpus, needed: int | None = None) -> Placed:
    """Return the placement with `use_gpu` resolved to true or false; a placement without `use_gpu`
    is returned unchanged.

    Args:
        needed: GPUs that the job needs; None: one for each of the fewest workers.

    Raises:
        PlacementError: as `settled_gpu`.
    """
    asked: UseGpu | None = getattr(placement, "use_gpu", None)
    if asked is None:
        return placement
    if getattr(placement, "gpu", None) is not None:
        asked = True  # of a kind that is named
    if needed is None:
        needed = getattr(placement, "fewest_workers", getattr(placement, "workers", 1))
    waits = bool(getattr(placement, "wait_for_nodes_seconds", 0.0))
    found = settled_gpu(asked, seen, "placement.use_gpu", waits=waits, needed=needed)
    return placement.model_copy(update={"use_gpu": found})


def gpus_here() -> SeenGpus:
    """Return the GPUs that torch sees on this machine."""
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        build = "" if torch.version.cuda else ", a build without CUDA,"
        return SeenGpus(0, f"torch {torch.__version__}{build} sees no GPU on this machine")
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(number)))
    return SeenGpus(number, f"this machine has {number} GPU{'s' * (number > 1)} ({names})")


def nodes_gpus(nodes: Sequence[Mapping[str, float]]) -> SeenGpus:
    """Count the GPUs in the Ray resources of a cluster's live nodes."""
    number = int(sum(node.get("GPU", 0.0) for node in nodes))
    of = f"the cluster's {len(nodes)} live nodes" if len(nodes) != 1 else "the cluster's live node"
    if not number:
        return SeenGpus(0, f"{of} offer{'s' * (len(nodes) == 1)} no GPU")
    kinds = gpu_kinds(nodes)
    named = f" ({', '.join(kinds)})" if kinds else ""
    have = "has" if len(nodes) == 1 else "have"
    return SeenGpus(number, f"{of} {have} {number} GPU{'s' * (number > 1)}{named}")


KIND = "accelerator_type:"
"""Prefix of Ray's resource for the kind of a node's GPUs."""


def gpu_kinds(nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the sorted, distinct names of the nodes' GPU models, as Ray names them."""
    found = {
        name.removeprefix(KIND)
        for node in nodes
        if node.get("GPU")
        for name in node
        if name.startswith(KIND)
    }
    return sorted(found)


def has_named_gpu(gpu: str | None, node: Mapping[str, float]) -> bool:
    """Return whether a node may run workers of a placement that names a GPU model.

    A node that names no kind of its GPUs is taken, and so is every node where `gpu` is None.
    """
    kinds = gpu_kinds([node])
    return gpu is None or not kinds or is_kind(gpu, kinds)


def placed_here(placement: Placed) -> Placed:
    """Resolve the placement's `use_gpu` by the GPUs of this machine, without logging.

    For estimates and tables; a GPU that is asked for is taken to be there.
    """
    if getattr(placement, "use_gpu", None) != "auto":
        return placement
    uses = getattr(placement, "gpu", None) is not None or gpus_here().number > 0
    return placement.model_copy(update={"use_gpu": uses})


def allocator_environment() -> dict[str, str]:
    """Return the environment variables that configure torch's GPU memory allocator, except for
    those that the user has set.

    Each forward pass has another shape: segments that grow leave no gaps between them.
    """
    if {os.environ.get(name) for name in _ALLOCATOR} - {None, _GROWING}:
        return {}
    return {"PYTORCH_ALLOC_CONF": _GROWING}


def set_allocator() -> None:
    """Configure torch's GPU memory allocator for this process; without effect once the process uses
    a GPU.
    """
    os.environ.update(allocator_environment())


def check_deterministic_start() -> None:
    """Set the environment variable that makes cuBLAS deterministic; raise if this process already
    uses a GPU without it.

    Raises:
        PlacementError: the process uses a GPU already, without it.
    """
    import torch

    if CUBLAS in os.environ:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise PlacementError(
            "placement.deterministic needs the environment variable "
            f"{CUBLAS}={CUBLAS_DETERMINISTIC} before a process uses its GPU, but this "
            "process has already used its GPU; start a new process, or set the variable "
            "before the first use of the GPU"
        )
    os.environ[CUBLAS] = CUBLAS_DETERMINISTIC


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make torch use only deterministic operations inside the block; raise if it lacks one.

    Args:
        wanted: `placement.deterministic`; False changes nothing.

    Raises:
        PlacementError: an operation has no such form on this device.
    """
    if not wanted:
        yield
        return
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if not any(part in str(error) for part in _NOT_DETERMINISTIC):
            raise
        raise PlacementError(
            "placement.deterministic is true, but torch has no deterministic implementation of an "
            "operation that this training needs on this device: "
            f"{str(error).strip().partition('. ')[0]}. Set placement."
            "deterministic=false, or train on CPUs (placement.use_gpu=false)"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
