"""Output of `--dry-run` and `--list`: the run as YAML, and tables of what it would need."""

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import held_out_set
from rayembed.config.model import pretrained_parts
from rayembed.config.run import Run
from rayembed.config.sources import MtebSource, PairsSource, WikipediaSource
from rayembed.config.stage import StageConfig
from rayembed.data.sources.kinds import paths_of
from rayembed.pipeline.requirements import (
    ModelSize,
    checkpoint_bytes,
    expected_precision,
    export_bytes,
    machines,
    model_size,
    step_load,
    worker_memory,
)

_WIDTH = 140
"""Columns where the output is not a terminal."""


def print_dry_run(run: Run, *, out: TextIO, tables: TextIO) -> None:
    """Write the run as YAML to `out` and what it would need to `tables`.

    They are apart so that `--dry-run > run.yaml` gives a file which `--recipe run.yaml` takes.

    Raises:
        ConfigError: the model cannot be built as configured.
    """
    size = model_size(run.model)
    out.write(f"# run {run.name}, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    out.flush()
    console = _console(tables)
    console.print(_needs(run, size))
    console.print(_stages(run))
    console.print(_datasets(run))
    if own := _below_root(run):
        console.print(
            f"Must lie below data.root ({run.data.root or 'not set'}): {', '.join(own)}",
            soft_wrap=True,
        )


def print_recipes(runs: Iterable[Run], *, out: TextIO) -> None:
    """Write a table of recipes."""
    table = Table(title="Recipes", title_justify="left")
    table.add_column("recipe", no_wrap=True)
    for column in ("model", "backbone", "stages"):
        table.add_column(column)
    for run in runs:
        stages = " → ".join(f"{stage.name} {stage.steps:,}" for stage in run.stages)
        parts = " + ".join(map(_short, pretrained_parts(run.model).values()))
        table.add_row(run.name, run.model.kind, parts, stages)
    _console(out).print(table)


def _console(stream: TextIO) -> Console:
    return Console(
        file=stream, width=None if stream.isatty() else _WIDTH, highlight=False, markup=False
    )


def _needs(run: Run, size: ModelSize | None) -> Table:
    placement = run.placement
    table = Table(
        show_header=False,
        title=f"{run.name}, fingerprint {run.fingerprint}: what it needs",
        title_justify="left",
    )
    for name, reference in pretrained_parts(run.model).items():
        table.add_row(name, _short(reference))
    if size is None:
        table.add_row("parameters", "not known without fetching the model")
    else:
        precision = expected_precision(run)
        memory = worker_memory(size, precision.dtype, placement)
        share = size.trainable / size.total
        table.add_row(
            "parameters",
            f"{size.total:,}, of which {size.trainable:,} trained ({share:.1%})"
            + (f" and {size.active:,} at work on a token" if size.active else ""),
        )
        if run.model.backbone.dtype == "auto":
            table.add_row("number type", f"auto, on this machine {precision}")
        table.add_row(
            "memory a worker",
            f"{_gib(memory.total)} and activations: weights {_gib(memory.weights)}, "
            f"gradients {_gib(memory.gradients)}, optimiser {_gib(memory.optimizer)} "
            f"({precision.dtype}, ZeRO {placement.zero_stage})",
        )
        table.add_row(
            "disk",
            f"checkpoints {_gib(checkpoint_bytes(run, size))}, "
            f"models {_gib(export_bytes(run, size))}, and the prepared data",
        )
    teachers = {d.mining.teacher for d in run.data.datasets if d.mining is not None}
    if teachers:
        table.add_row("teacher for mining", ", ".join(sorted(map(_short, teachers))))
    table.add_row("scores", _scores(run))
    table.add_row("machines", machines(placement))
    table.add_row("data root", run.data.root or "the working directory")
    table.add_row("storage", placement.storage_path)
    return table


def _scores(run: Run) -> str:
    """What the run's models are scored on, and which ones."""
    if not run.takes_scores:
        return "none: no tasks are named, and nothing is held out"
    evaluation = run.evaluation
    on = [*evaluation.benchmarks, *evaluation.tasks, *(own.name for own in evaluation.own_sets)]
    on += [held_out_set(dataset.name) for dataset in run.held_out_datasets]
    models = ["untrained"] if evaluation.before_training else []
    models += [stage.name for stage in run.stages]
    models += map(_short, evaluation.baselines)
    return f"of {', '.join(models)} on {', '.join(on)}"


def _stages(run: Run) -> Table:
    table = Table(
        "stage",
        "steps",
        "pairs a step",
        "hard negatives",
        "in-batch",
        "texts a step ≤",
        "tokens a step ≤",
        "pairs in all",
        title="Stages",
        title_justify="left",
    )
    for stage in run.stages:
        load = step_load(run, stage)
        table.add_row(
            stage.name,
            f"{stage.steps:,}",
            f"{stage.batch.global_pairs:,}",
            str(stage.batch.num_negatives),
            "yes" if stage.batch.in_batch_negatives else "no",
            f"{load.texts:,}",
            f"{load.tokens:,}",
            f"{stage.steps * stage.batch.global_pairs:,}",
        )
    return table


def _datasets(run: Run) -> Table:
    table = Table(title="Data", title_justify="left")
    table.add_column("data set", no_wrap=True)
    table.add_column("task", no_wrap=True)
    table.add_column("rows", justify="right")
    table.add_column("source", overflow="fold")
    table.add_column("negatives")
    if run.held_out_datasets:
        table.add_column("held out")
    for stage in run.stages:
        table.add_column(f"in {stage.name}", justify="right")
    for dataset in run.data.datasets:
        rows = "all" if dataset.num_samples is None else f"{dataset.num_samples:,}"
        if dataset.sample_share is not None:
            rows = f"{dataset.sample_share:.0%}"
        shares = [_share(stage, dataset.name) for stage in run.stages]
        if run.held_out_datasets:
            shares.insert(0, "" if dataset.held_out is None else dataset.held_out.summary)
        table.add_row(
            dataset.name, dataset.task, rows, _source(dataset), _negatives(dataset), *shares
        )
    return table


def _below_root(run: Run) -> list[str]:
    """Places that only `data.root` makes whole."""
    places = (place for dataset in run.data.datasets for place in paths_of(dataset.source).values())
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


def _source(dataset: DatasetConfig) -> str:
    match dataset.source:
        case PairsSource(path=path):
            return path
        case WikipediaSource(pairs=pairs, path=path):
            return f"{pairs} of {_short(path)}"
        case MtebSource(task=task, split=split):
            return f"{split} of mteb's {task}"
        case source:
            return f"{source.kind} of {_short(source.path)}"


def _negatives(dataset: DatasetConfig) -> str:
    if dataset.mining is not None:
        return f"{dataset.mining.num_negatives} mined"
    return "given" if dataset.has_negatives else "none"


def _short(reference: str) -> str:
    """A reference without its hash, and of a package only the package."""
    body = reference.partition("?")[0]
    return body.removeprefix("pypi://").partition("/")[0] if body.startswith("pypi://") else body


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB"
