"""Estimate what a run needs before it starts: parameters, memory of a worker, suitable
GPUs, disk.
"""

from dataclasses import dataclass

from rayembed.config.document import NamedRun
from rayembed.config.placement import GPUS
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError
from rayembed.machine.device import placed_here
from rayembed.machine.hardware import micro_batch_tokens
from rayembed.pipeline.run.dry_run import Estimates, Runs, step_load
from rayembed_extras.estimates.model_sizes import remembered_activations, remembered_size
from rayembed_extras.estimates.requirements import (
    WIDTHS,
    Activations,
    ModelSize,
    WorkerMemory,
    checkpoint_bytes,
    expected_precision,
    export_bytes,
    worker_memory,
)
from rayembed_extras.estimates.time import counted_kind, estimate, estimate_trials, gpu_hours

_CUDA = 2_000_000_000
"""Bytes of CUDA's context, NCCL's buffers and the libraries' workspaces; assumed."""

_SPARE = 0.05
"""Share of a GPU left unused because shapes change; assumed."""

_BUCKET = 500_000_000
"""Elements of DeepSpeed's buffer of gradients; see `deepspeed_settings`."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes that a worker needs on its GPU."""

    states: WorkerMemory
    buffers: int
    """Bytes of a micro-batch's gradients, and of the bucket that reduces them in the model's number
    type and in float32."""
    activations: int | None
    """Bytes of activations of the stage that needs most; None if they are not counted."""

    @property
    def total(self) -> int:
        """Total bytes including CUDA's own, without activations if these could not be counted."""
        return self.states.total + self.buffers + (self.activations or 0) + _CUDA


def gpu_memory(run: Run, size: ModelSize) -> GpuMemory:
    """Estimate the memory of a worker's GPU at the run's minimum number of workers."""
    found = remembered_activations(run.model)
    width = WIDTHS[expected_precision(run).dtype]
    buffers = size.trainable * width if run.placement.zero_stage == 2 else 0
    if run.placement.fewest_workers > 1:
        buffers += min(_BUCKET, size.trainable) * (width + 4)
    needed = None
    if found is not None:
        needed = max(_activation_bytes(run, stage, found) for stage in run.stages)
    return GpuMemory(worker_states(run, size), buffers, needed)


def worker_states(run: Run, size: ModelSize) -> WorkerMemory:
    """Worker memory for weights, gradients and optimiser, without activations, in the stage that
    needs most.
    """
    each = max(stage.optimizer.state_bytes for stage in run.stages)
    teaches = any(stage.hidden_states is not None for stage in run.stages)
    dtype = expected_precision(run).dtype
    return worker_memory(size, dtype, run.placement, each, teaches=teaches)


def host_bytes(run: Run, size: ModelSize) -> int:
    """Host memory of a worker in bytes while it loads the whole model, for any ZeRO stage."""
    return size.total * WIDTHS[expected_precision(run).dtype]


def gpus_that_fit(memory: GpuMemory) -> tuple[list[str], list[str]]:
    """Names of the GPUs in `GPUS` with enough memory for a worker, and of the others."""
    fit = {name: memory.total <= usable_bytes(name) for name in GPUS}
    return [name for name in fit if fit[name]], [name for name in fit if not fit[name]]


def usable_bytes(gpu: str) -> int:
    """Bytes of a GPU of `GPUS` that a worker may use."""
    return int((1 - _SPARE) * GPUS[gpu] * 2**30)


def _activation_bytes(run: Run, stage: StageConfig, found: Activations) -> int:
    """Activation bytes that a worker keeps in a step, including one recomputed layer.

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


class Counted(Estimates):
    """Table of estimates that are computed from the shapes of models, without loading weights."""

    def needs(self, run: NamedRun) -> dict[str, str]:
        """Build table rows with a run's parameters, number type, memory and disk space."""
        if isinstance(run, Run):
            return _needs(run)
        kind = counted_kind(run)
        return {} if kind is None else kind.needs(run)

    def check(self, run: NamedRun) -> None:
        """Raise ConfigError if a run does not fit the GPU that its placement names."""
        if isinstance(run, Run) and run.placement.gpu is not None:
            size = remembered_size(run.model)
            if size is not None:
                check_fits(run.placement.gpu, gpu_memory(run, size))

    def time(self, runs: Runs, prepared: Runs = (), best: NamedRun | None = None) -> str | None:
        """Estimated time as text: minutes on CPUs, shared by concurrent trials, or GPU-hours on
        GPUs.
        """
        found = estimate(runs[0]) if best is None else estimate_trials(runs, prepared, best)
        return gpu_hours(runs) if found is None else str(found)


COUNTED = Counted()


def check_fits(gpu: str, memory: GpuMemory) -> None:
    """Raise if a run is known not to fit the GPU that its placement names.

    Raises:
        ConfigError: it needs more; activations that are not counted would come on top.
    """
    room = usable_bytes(gpu)
    if memory.total > room:
        raise ConfigError(
            f"placement.gpu is {gpu}, on which a worker may use {_gib(room)} of memory, but this "
            f"run needs {_gib(memory.total)}; set a smaller placement.micro_batch_tokens, "
            "placement.gradient_checkpointing=true or a higher placement.zero_stage with more "
            "workers, or use a larger GPU"
        )


def _needs(run: Run) -> dict[str, str]:
    size, placement = remembered_size(run.model), run.placement
    if size is None:
        return {"parameters": "not known without fetching the model"}
    precision = expected_precision(run)
    memory = worker_states(run, size)
    share = size.trainable / size.total
    facts = {
        "parameters": f"{size.total:,}, of which {size.trainable:,} trained ({share:.1%})"
        + (f" and {size.active:,} at work on a token" if size.active else "")
    }
    if run.model.backbone.dtype == "auto":
        facts["number type"] = f"auto, on this machine {precision}"
    states = (
        f"weights {_gib(memory.weights)}, gradients {_gib(memory.gradients)}, "
        f"optimiser {_gib(memory.optimizer)}"
        + (f", teacher {_gib(memory.teacher)}" if memory.teacher else "")
    )
    of = f"({precision.dtype}, ZeRO {placement.zero_stage})"
    if placed_here(placement).on_gpu:
        facts |= _of_gpu(run, size, states, of)
    else:
        facts["memory a worker"] = f"{_gib(memory.total)} and activations: {states} {of}"
    until = "" if placement.keep_states else " until the run is done"
    facts["disk"] = (
        f"checkpoints {_gib(checkpoint_bytes(run, size))}{until}, "
        f"models {_gib(export_bytes(run, size))}, and the prepared data"
    )
    return facts


def _of_gpu(run: Run, size: ModelSize, states: str, of: str) -> dict[str, str]:
    """Build table rows with the memory of a worker's GPU and node, and the GPUs that have
    enough.
    """
    memory = gpu_memory(run, size)
    counted = memory.activations is not None
    activations = _gib(memory.activations or 0) if counted else "not counted"
    fit, too_small = gpus_that_fit(memory)
    given = ", ".join(fit) or "none that is known here"
    without = f"; not {', '.join(too_small)}" if too_small else ""
    named = {} if run.placement.gpu is None else {"fits": _fits(run.placement.gpu, memory)}
    return {
        "memory a worker": (
            f"{_gib(memory.total)}{'' if counted else ' and activations'}: {states}, buffers of "
            f"gradients {_gib(memory.buffers)}, activations of texts of full length {activations}, "
            f"and CUDA's own {of}"
        ),
        "GPUs with that memory": f"{given}{without}" if counted else "activations would decide",
        **named,
        "host memory a worker": f"{_gib(host_bytes(run, size))} while it loads, and data",
    }


def _fits(gpu: str, memory: GpuMemory) -> str:
    room = usable_bytes(gpu)
    share = f"{_gib(memory.total)} of {_gib(room)}"
    if memory.total > room:
        return f"not on {gpu}: {share}"
    if memory.activations is None:
        return f"on {gpu} without activations, which are not counted: {share}"
    return f"on {gpu}: {share}"


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB"
