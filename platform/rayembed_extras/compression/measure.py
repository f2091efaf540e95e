"""Measure speed and memory of saved models on this machine, each in a process of its own."""

import gc
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from rayembed.config.backbone import Dtype
from rayembed.errors import ArtifactError

_IMPORTED_ONCE = [
    "rayembed.models.loading.load",
    "rayembed.models.passes.encoding",
    "transformers.modeling_utils",
    "transformers.generation.candidate_generator",
]
"""Imports of six to ten seconds that a parent process does once for all measuring processes."""

_WARM_UP = 32
"""Number of texts in the first pass."""


@dataclass(frozen=True)
class Measured:
    """Speed and memory of a model, measured in one process."""

    documents_per_second: float
    """Texts embedded a second, including tokenisation; a first pass over a few texts is not
    counted."""
    memory: int
    """Bytes that loading the model and a pass over a few texts add to the process; libraries are
    loaded before."""


def measure(
    folder: Path, documents: Sequence[str], *, dtype: Dtype | None, threads: int
) -> Measured:
    """Measure speed and memory of a model on the CPU, in a new process.

    Args:
        documents: different texts.
        dtype: of the model; None: as `load_model` has it.
        threads: of its kernels.

    Raises:
        RayembedError: the model cannot be loaded.
        ArtifactError: the process died, as for lack of memory.
    """
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(_IMPORTED_ONCE)
    with ProcessPoolExecutor(1, mp_context=start) as pool:
        try:
            return pool.submit(_measure, folder, list(documents), dtype, threads).result()
        except BrokenProcessPool as error:
            raise ArtifactError(
                f"the process that measures {str(folder)!r} died, possibly because memory ran "
                f"out: {error}; leave the measurement out (speed=null)"
            ) from error


def _measure(folder: Path, documents: list[str], dtype: Dtype | None, threads: int) -> Measured:
    import psutil
    import torch

    from rayembed.models.loading.load import load_model
    from rayembed.models.passes.encoding import encode

    torch.set_num_threads(threads)
    process = psutil.Process()
    model = load_model(folder, dtype=dtype)  # and what it imports
    del model
    gc.collect()
    before = process.memory_info().rss
    model = load_model(folder, dtype=dtype)
    encode(model, documents[:_WARM_UP], role="document", allow_empty=True)
    memory = process.memory_info().rss - before
    began = time.perf_counter()
    encode(model, documents, role="document", allow_empty=True)
    return Measured(len(documents) / (time.perf_counter() - began), max(memory, 0))
