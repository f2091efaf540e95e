"""Record the provenance of a run: code, packages, machine. No user or host names."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rayembed.machine.cores import num_cores

PACKAGES = (
    "accelerate",
    "deepspeed",
    "faiss-cpu",
    "faiss-gpu-cu12",
    "mlflow",
    "mteb",
    "numpy",
    "peft",
    "pyarrow",
    "ray",
    "sentence-transformers",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages that can affect results."""

_CONSTRAINTS = "cluster/constraints.txt"
_COMMAND_SECONDS = 20


COMMIT_VARIABLE = "RAYEMBED_COMMIT"
"""Environment variable with the checkout's commit for a submitted job, which runs a copy without
git metadata; in the format of `git describe --always --abbrev=40 --dirty --exclude '*'`."""

_DIRTY = "-dirty"


def collect_provenance(hardware: dict[str, Any] | None) -> dict[str, Any]:
    """Collect provenance as `code`, `packages`, `constraints`, `python`, `system`, `hardware` and
    `time`.

    Works without git, without a GPU and outside a checkout; what is not known is None.

    Args:
        hardware: what `node_hardware` found where the workers run; None: not known.
    """
    return {
        "code": code_version(Path(__file__).parent),
        "packages": package_versions(),
        "constraints": constraints_file(Path()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "hardware": hardware,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def node_hardware() -> dict[str, Any]:
    """Hardware of the node that calls it: `cpu`, `cpu_cores`, `amx_bf16`, `memory_gib` and
    `gpus`.
    """
    return {
        "cpu": cpu_model(),
        "cpu_cores": num_cores(),
        "amx_bf16": "amx_bf16" in _read("/proc/cpuinfo"),
        "memory_gib": memory_gib(),
        "gpus": gpus(),
    }


def code_version(folder: Path) -> dict[str, Any]:
    """Version of the code: rayembed's `version`, the checkout's `commit`, and whether it has
    `uncommitted_changes`.

    Both are None where the code lies outside of git, also where a checkout of something else
    surrounds it (a virtual environment in another project's folder).
    """
    found: dict[str, Any] = {
        "version": _version("rayembed"),
        "commit": None,
        "uncommitted_changes": None,
    }
    ours = _output("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py")
    if ours is None:
        return {**found, **_submitted_code()}
    found["commit"] = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    found["uncommitted_changes"] = None if changes is None else bool(changes)
    return found


def _submitted_code() -> dict[str, Any]:
    told = os.environ.get(COMMIT_VARIABLE)
    if not told:
        return {}
    return {
        "commit": told.removesuffix(_DIRTY),
        "uncommitted_changes": told.endswith(_DIRTY),
    }


def package_versions() -> dict[str, str]:
    """Installed versions of packages that can affect results."""
    versions = {name: _version(name) for name in PACKAGES}
    return {name: found for name, found in versions.items() if found is not None}


def constraints_file(directory: Path) -> dict[str, str] | None:
    """`path` and `sha256` of the constraints file in the directory or the checkout; None if there
    is none.
    """
    for root in (directory, Path(__file__).parents[3]):
        path = root / _CONSTRAINTS
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            return {"path": _CONSTRAINTS, "sha256": digest}
    return None


def cpu_model() -> str | None:
    """Processor model name."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or None


def cpu_summary() -> str:
    """Number of cores and processor model of this machine, as shown in results."""
    return f"{num_cores()} cores ({cpu_model()})"


def memory_gib() -> float:
    """Memory available to this process in GiB: the container's limit or the machine's memory."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(path).strip()
        if limit.isdigit():
            sizes.append(int(limit))
    return round(min(sizes) / 2**30, 1)


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, from `nvidia-smi`; empty without GPUs."""
    told = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return [line.strip() for line in told.splitlines()] if told else []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str | None:
    """Output of a command; None if the command is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
