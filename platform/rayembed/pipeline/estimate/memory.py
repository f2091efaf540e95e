"""Estimate of a GPU's and a node's memory before a run starts, and of the GPUs that it fits.

Weights, gradients and the optimiser follow from the placement; activations are counted for the
model's shape (`activations`). It is for texts of full length, so that no batch needs more; the
candidates' similarities, which are small, are left out.
"""

from dataclasses import dataclass

from rayembed.config.gpus import GPUS
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.machine.hardware import micro_batch_tokens
from rayembed.pipeline.estimate.model_sizes import remembered_activations
from rayembed.pipeline.estimate.requirements import (
    Activations,
    ModelSize,
    WorkerMemory,
    expected_precision,
    step_load,
    worker_memory,
)

_CUDA = 2_000_000_000
"""CUDA's context, NCCL's buffers and the libraries' workspaces; assumed."""

_SPARE = 0.05
"""Share of a GPU that shapes which change leave unused; assumed."""

_BUCKET = 500_000_000
"""Elements of DeepSpeed's buffer of gradients; see `engine.deepspeed_settings`."""

_WIDTHS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class GpuMemory:
    """Bytes that a worker needs on its GPU."""

    states: WorkerMemory
    buffers: int
    """A micro-batch's gradients and the bucket in which they are reduced, in float32 beside the
    model's type."""
    activations: int | None
    """Memory of the stage that needs most; None where they are not counted."""

    @property
    def total(self) -> int:
        """Bytes of all, CUDA's own included; without activations where they are not counted."""
        return self.states.total + self.buffers + (self.activations or 0) + _CUDA


def gpu_memory(run: Run, size: ModelSize) -> GpuMemory:
    """Memory of a worker's GPU, at the run's fewest workers."""
    dtype = expected_precision(run).dtype
    states = max(stage.optimizer.state_bytes for stage in run.stages)
    found = remembered_activations(run.model)
    width = _WIDTHS[dtype]
    buffers = size.trainable * width if run.placement.zero_stage == 2 else 0
    if run.placement.fewest_workers > 1:
        buffers += min(_BUCKET, size.trainable) * (width + 4)
    needed = None
    if found is not None:
        needed = max(_activation_bytes(run, stage, found) for stage in run.stages)
    teaches = has_teacher_of_states(run)
    memory = worker_memory(size, dtype, run.placement, states, teaches=teaches)
    return GpuMemory(memory, buffers, needed)


def has_teacher_of_states(run: Run) -> bool:
    """Whether a teacher runs in the steps of a stage."""
    return any(stage.hidden_states is not None for stage in run.stages)


def host_bytes(run: Run, size: ModelSize) -> int:
    """Bytes of a worker's host memory while it loads: the whole model, whatever ZeRO partitions."""
    return size.total * _WIDTHS[expected_precision(run).dtype]


def gpus_that_fit(memory: GpuMemory) -> tuple[list[str], list[str]]:
    """Names of `GPUS` that hold a worker, and of those that do not."""
    fit = {name: memory.total <= usable_bytes(name) for name in GPUS}
    return [name for name in fit if fit[name]], [name for name in fit if not fit[name]]


def usable_bytes(gpu: str) -> int:
    """Bytes of a GPU of `GPUS` that a worker may need at most."""
    return int((1 - _SPARE) * GPUS[gpu] * 2**30)


def _activation_bytes(run: Run, stage: StageConfig, found: Activations) -> int:
    """Bytes of a step's graphs on a worker, and of a layer that is computed again.

    Where a setting is `auto` the least: more is kept only where that fits.
    """
    placement = run.placement
    of_worker = -(-step_load(run, stage).tokens // placement.fewest_workers)
    budget = placement.micro_batch_tokens or micro_batch_tokens("cuda")
    micro_batch = min(budget, of_worker)
    graphs = of_worker if placement.grad_cache is False else micro_batch
    # A graph keeps a teacher's states beside the model's, about what it keeps of each layer anyhow.
    states = graphs * found.kept_recomputing if stage.hidden_states is not None else 0
    if placement.gradient_checkpointing is False:
        return int(graphs * found.kept + states)
    return int(graphs * found.kept_recomputing + micro_batch * found.of_layer + states)
