"""Output of `--dry-run` and `--list`: the run as YAML, and tables of what it would need."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import held_out_set
from rayembed.config.idle import idle_settings
from rayembed.config.placement import GPUS
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.display.tables import Table, console, facts_table
from rayembed.errors import ConfigError
from rayembed.machine.device import placed_here
from rayembed.machine.hardware import micro_batch_tokens
from rayembed.pipeline.checks.files import AtHand
from rayembed.pipeline.estimate.model_sizes import remembered_activations, remembered_size
from rayembed.pipeline.estimate.requirements import (
    Activations,
    ModelSize,
    WorkerMemory,
    auto_device,
    checkpoint_bytes,
    expected_precision,
    export_bytes,
    machines,
    step_load,
    worker_memory,
)

_CUDA = 2_000_000_000
"""CUDA's context, NCCL's buffers and the libraries' workspaces; assumed."""

_SPARE = 0.05
"""Share of a GPU that shapes which change leave unused; assumed."""

_BUCKET = 500_000_000
"""Elements of DeepSpeed's buffer of gradients; see `deepspeed_settings`."""

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


def print_dry_run(run: Run, found: AtHand, *, out: TextIO, tables: TextIO) -> None:
    """Write the run as YAML to `out`, and to `tables` what it would need and what was read.

    They are apart so that `--dry-run > run.yaml` gives a file which `--recipe run.yaml` takes.

    Raises:
        ConfigError: the model cannot be built as configured, or does not fit the GPU that the
            placement names; that is told after all else.
    """
    size = remembered_size(run.model)
    out.write(f"# run {run.name}, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    out.flush()
    printer = console(tables)
    printer.print(_needs(run, size))
    printer.print(_stages(run, found))
    printer.print(_datasets(run))
    if found.heads:
        printer.print(_rows_read(found))
    for line in idle_settings(run):
        printer.print(f"No effect: {line}", soft_wrap=True, markup=False)
    if own := _below_root(run, found):
        printer.print(
            f"Must lie below data.root ({run.data.root or 'not set'}): {', '.join(own)}",
            soft_wrap=True,
        )
    if size is not None and run.placement.gpu is not None:
        check_fits(run.placement.gpu, gpu_memory(run, size))


def check_fits(gpu: str, memory: GpuMemory) -> None:
    """Refuse a run that is known not to fit the GPU.

    Raises:
        ConfigError: it needs more; activations that are not counted would come on top.
    """
    room = usable_bytes(gpu)
    if memory.total > room:
        raise ConfigError(
            f"placement.gpu is {gpu}, on which a worker may need {_gib(room)}, and this run needs "
            f"{_gib(memory.total)}; set a smaller placement.micro_batch_tokens, "
            "placement.gradient_checkpointing=true, a higher placement.zero_stage with more "
            "workers, or take a larger GPU"
        )


def print_recipes(runs: Iterable[Run], *, out: TextIO) -> None:
    """Write a table of recipes."""
    rows = []
    for run in runs:
        stages = " → ".join(f"{stage.name} {stage.length}" for stage in run.stages)
        parts = " + ".join(map(_short, run.model.parts.values()))
        rows.append([run.name, run.model.kind, parts, stages])
    console(out).print(Table(["recipe", "model", "backbone", "stages"], rows, title="Recipes"))


def _needs(run: Run, size: ModelSize | None) -> Table:
    placement = run.placement
    facts = {name: _short(part) for name, part in run.model.parts.items()}
    if size is None:
        facts["parameters"] = "not known without fetching the model"
    else:
        precision = expected_precision(run)
        each = max(stage.optimizer.state_bytes for stage in run.stages)
        teaches = has_teacher_of_states(run)
        memory = worker_memory(size, precision.dtype, placement, each, teaches=teaches)
        share = size.trainable / size.total
        facts["parameters"] = (
            f"{size.total:,}, of which {size.trainable:,} trained ({share:.1%})"
            + (f" and {size.active:,} at work on a token" if size.active else "")
        )
        if run.model.backbone.dtype == "auto":
            facts["number type"] = f"auto, on this machine {precision}"
        states = (
            f"weights {_gib(memory.weights)}, gradients {_gib(memory.gradients)}, "
            f"optimiser {_gib(memory.optimizer)}"
            + (f", teacher {_gib(memory.teacher)}" if teaches else "")
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
    teachers = {d.mining.teacher for d in run.data.datasets if d.mining is not None}
    if teachers:
        facts["teacher for mining"] = ", ".join(sorted(map(_short, teachers)))
    stored = {teacher.teacher for stage in run.stages for teacher in stage.teachers}
    if stored:
        facts["teachers of vectors"] = ", ".join(sorted(map(_short, stored)))
    of_states = {s.hidden_states.teacher for s in run.stages if s.hidden_states is not None}
    if of_states:
        facts["teacher of hidden states"] = ", ".join(sorted(map(_short, of_states)))
    facts["scores"] = _scores(run)
    facts |= auto_device(placement)
    facts["machines"] = machines(placement)
    facts["data root"] = run.data.root or "the working directory"
    facts["storage"] = placement.storage_path
    return facts_table(f"{run.name}, fingerprint {run.fingerprint}: what it needs", facts)


def _of_gpu(run: Run, size: ModelSize, states: str, of: str) -> dict[str, str]:
    """Memory of a worker's GPU and of its node, and which GPUs have it."""
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


def _scores(run: Run) -> str:
    """Tasks and models that the run scores."""
    if not run.takes_scores:
        return "none: no tasks are named, and nothing is held out"
    evaluation = run.evaluation
    on = [*evaluation.benchmarks, *evaluation.tasks, *(own.name for own in evaluation.own_sets)]
    on += [held_out_set(dataset.name) for dataset in run.held_out_datasets]
    models = ["untrained"] if evaluation.before_training else []
    models += [stage.name for stage in run.stages]
    models += [f"{evaluation.num_mixtures} mixtures"] if evaluation.num_mixtures else []
    models += map(_short, evaluation.baselines)
    return f"of {', '.join(models)} on {', '.join(on)}"


def _stages(run: Run, found: AtHand) -> Table:
    rows = []
    for stage in run.stages:
        load = step_load(run, stage)
        steps, pairs = f"{stage.steps:,}", f"{stage.steps * stage.batch.global_pairs:,}"
        if stage.epochs is not None:
            expected = found.expected_records(stage) is not None
            steps, pairs = (f"about {steps}", f"about {pairs}") if expected else ("?", "?")
        rows.append(
            [
                stage.name,
                steps,
                f"{stage.batch.global_pairs:,}",
                stage.batch.num_negatives,
                "yes" if stage.batch.in_batch_negatives else "no",
                f"{load.texts:,}",
                f"{load.tokens:,}",
                pairs,
                f"{stage.epochs:g}" if stage.epochs else _epochs(stage, found),
            ]
        )
    heads = ["stage", "steps", "pairs a step", "hard negatives", "in-batch", "texts a step ≤"]
    heads += ["tokens a step ≤", "pairs in all", "epochs"]
    return Table(heads, rows, title="Stages")


def _datasets(run: Run) -> Table:
    rows = []
    held_out = bool(run.held_out_datasets)
    for dataset in run.data.datasets:
        number = "all" if dataset.num_samples is None else f"{dataset.num_samples:,}"
        if dataset.sample_share is not None:
            number = f"{dataset.sample_share:.0%}"
        shares = [_share(stage, dataset.name) for stage in run.stages]
        what = [
            dataset.name,
            dataset.task,
            number,
            _short(dataset.source.summary),
            _negatives(dataset),
        ]
        if held_out:
            what.append("" if dataset.held_out is None else dataset.held_out.summary)
        rows.append([*what, *shares])
    heads = ["data set", "task", "rows", "source", "negatives"]
    heads += ["held out"] if held_out else []
    heads += [f"in {stage.name}" for stage in run.stages]
    return Table(heads, rows, title="Data", align="llrlllr" if held_out else "llrllr")


def _epochs(stage: StageConfig, found: AtHand) -> str:
    """About how often the stage trains on each record, where all files are here."""
    records = found.expected_records(stage)
    return f"{stage.steps * stage.batch.global_pairs / records:.3g}" if records else ""


def _rows_read(found: AtHand) -> Table:
    rows = []
    for name, head in found.heads.items():
        number = "not counted" if head.rows is None else f"{head.rows:,}"
        more = f" and {len(head.files) - 1} more" if len(head.files) > 1 else ""
        rejected = sum(head.rejected.values())
        what = "" if head.whole else f" of the first {head.read:,}"
        rows.append(
            [
                name,
                f"{head.files[0]}{more}",
                number if head.exact or head.rows is None else f"about {number}",
                f"{rejected:,}{what}" if head.records is not None else "",
                ", ".join(head.columns),
                head.example,
            ]
        )
    heads = ["data set", "files", "rows", "rejected", "columns", "first row"]
    return Table(heads, rows, title="Rows that were read", align="llrrll")


def _below_root(run: Run, found: AtHand) -> list[str]:
    """Places that only `data.root` makes whole, and that are not here."""
    elsewhere = [dataset for dataset in run.data.datasets if dataset.name not in found.heads]
    places = (place for dataset in elsewhere for place in dataset.source.paths.values())
    return [place for place in places if "://" not in place and not Path(place).is_absolute()]


def _share(stage: StageConfig, name: str) -> str:
    weight = stage.datasets.get(name)
    if weight is None:
        return ""
    if stage.batch.temperature is not None:
        # How many rows there are is known when they are read.
        power = "" if stage.batch.temperature == 1 else f"^(1/{stage.batch.temperature:g})"
        return f"{weight:g} × rows{power}"
    return f"{weight / sum(stage.datasets.values()):.2%}"


def _negatives(dataset: DatasetConfig) -> str:
    if not dataset.has_negatives:
        return "none"
    mined = "given" if dataset.mining is None else f"{dataset.mining.num_negatives} mined"
    return ", ".join([mined, *(step.of_negatives for step in dataset.steps if step.of_negatives)])


def _short(reference: str) -> str:
    """A reference without its hash, and of a package only the package."""
    body = reference.partition("?")[0]
    return body.removeprefix("pypi://").partition("/")[0] if body.startswith("pypi://") else body


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB"
