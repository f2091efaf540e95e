"""Output of `--dry-run` and `--list`: the run as YAML, and tables of what it needs.

What has to be counted for that, a model's size, memory and time, is a package's of the table
`ESTIMATES`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rayembed.config.data import DatasetConfig
from rayembed.config.document import NamedRun
from rayembed.config.held_out import held_out_set
from rayembed.config.idle import idle_settings
from rayembed.config.named_benchmarks import sets_to_choose
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.config.table import NamedTable
from rayembed.display.tables import Table, console, facts_table
from rayembed.machine.device import gpus_here, placed_here
from rayembed.pipeline.checks.files import AtHand

Runs = Sequence[NamedRun]


class Estimates:
    """Base class for estimates of a run's memory, disk and time; without an override nothing is
    estimated.
    """

    def needs(self, run: NamedRun) -> dict[str, str]:
        """Estimate sizes, memory and disk space of a run, as rows of a table.

        Raises:
            ConfigError, ArtifactError: the model cannot be built as configured.
        """
        return {}

    def check(self, run: NamedRun) -> None:
        """Raise ConfigError if a run does not fit the GPU that its placement names."""

    def time(self, runs: Runs, prepared: Runs = (), best: NamedRun | None = None) -> str | None:
        """Sentence with the estimated time of a run, or of all trials of a sweep; None if unknown.

        Args:
            prepared: one run for each different data of trials.
            best: as the best trial's run is scored in the end, with its baselines; None: one run.
        """
        return None


ESTIMATES = NamedTable("rayembed.estimates", Estimates, "estimate of runs", {})


def estimates() -> Estimates:
    """Return the registered estimates, or the base class, which estimates nothing."""
    return next(iter(ESTIMATES.members().values()), Estimates())


def print_dry_run(run: Run, found: AtHand, *, out: TextIO, tables: TextIO) -> None:
    """Write the run as YAML to `out`, and tables of what it needs and reads to `tables`.

    They are apart so that `--dry-run > run.yaml` gives a file which `--recipe run.yaml` takes.

    Raises:
        ConfigError: the model cannot be built as configured, or does not fit the GPU that the
            placement names; that is told after all else.
    """
    counted = estimates().needs(run)
    out.write(f"# run {run.name}, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    out.flush()
    printer = console(tables)
    printer.print(_needs(run, counted))
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
    estimates().check(run)


@dataclass(frozen=True)
class StepLoad:
    """Maximum numbers of texts and tokens in one step of a stage, over all workers."""

    texts: int
    """Queries, positives and hard negatives; equal texts are encoded once."""
    tokens: int
    """Tokens if each text had its full length."""


def step_load(run: Run, stage: StageConfig) -> StepLoad:
    """Compute the maximum numbers of texts and tokens in one step, with prompts and context."""
    documents, pairs = 1 + stage.batch.num_negatives, stage.batch.global_pairs
    query = stage.query_max_length or run.model.query_max_length
    document = stage.document_max_length or run.model.document_max_length
    texts = pairs * (1 + documents)
    tokens = pairs * (query + documents * document)
    tokens += texts * run.model.added_tokens
    tokens += min(run.model.context_places, pairs) * document
    return StepLoad(texts=texts, tokens=tokens)


def machines(placement: Placement) -> str:
    """Describe the number of workers with their total CPUs and GPUs, for a table."""

    def of_all(each: float) -> str:
        numbers = (placement.fewest_workers, placement.workers)
        return " to ".join(f"{number * each:g}" for number in sorted({*numbers}))

    gpus = f", {of_all(1)} GPUs" if placed_here(placement).on_gpu else ", no GPU"
    return f"{of_all(1)} workers with {of_all(placement.cpus_per_worker)} CPUs{gpus}"


def auto_device(placement: Placement) -> dict[str, str]:
    """Table row with the device that `use_gpu: auto` selects here; empty if the setting is not
    `auto`.
    """
    if placement.use_gpu != "auto":
        return {}
    settled = "GPU" if placed_here(placement).on_gpu else "CPU"
    return {"device": f"auto, on this machine {settled}: {gpus_here().text}"}


def print_recipes(runs: Iterable[Run], *, out: TextIO) -> None:
    """Print a table of recipes."""
    rows = []
    for run in runs:
        stages = " → ".join(f"{stage.name} {stage.length}" for stage in run.stages)
        parts = " + ".join(map(short_reference, run.model.parts.values()))
        rows.append([run.name, run.model.kind, parts, stages])
    console(out).print(Table(["recipe", "model", "backbone", "stages"], rows, title="Recipes"))


def _needs(run: Run, counted: dict[str, str]) -> Table:
    facts = {name: short_reference(part) for name, part in run.model.parts.items()} | counted
    teachers = {d.mining.teacher for d in run.data.datasets if d.mining is not None}
    if teachers:
        facts["teacher for mining"] = ", ".join(sorted(map(short_reference, teachers)))
    stored = {teacher.teacher for stage in run.stages for teacher in stage.teachers}
    if stored:
        facts["teachers of vectors"] = ", ".join(sorted(map(short_reference, stored)))
    of_states = {s.hidden_states.teacher for s in run.stages if s.hidden_states is not None}
    if of_states:
        facts["teacher of hidden states"] = ", ".join(sorted(map(short_reference, of_states)))
    facts["scores"] = _scores(run)
    facts |= auto_device(run.placement)
    facts["machines"] = machines(run.placement)
    facts["data root"] = run.data.root or "the working directory"
    facts["storage"] = run.placement.storage_path
    return facts_table(f"{run.name}, fingerprint {run.fingerprint}: what it needs", facts)


def _scores(run: Run) -> str:
    """Describe the tasks on which the run's models are scored, and these models."""
    if not run.model.embeds:
        return "of pairs, behind the embedder: this model gives no vectors"
    if not run.takes_scores:
        return "none: no tasks are named, and nothing is held out"
    evaluation = run.evaluation
    open_sets = [own.name for own in sets_to_choose(run)]
    on = [*evaluation.benchmarks, *evaluation.tasks]
    on += [own.name for own in evaluation.own_sets if own.name not in open_sets]
    on += [held_out_set(dataset.name) for dataset in run.held_out_datasets]
    models = ["untrained"] if evaluation.before_training else []
    models += [stage.name for stage in run.stages]
    models += [f"{evaluation.num_mixtures} mixtures"] if evaluation.num_mixtures else []
    models += map(short_reference, evaluation.baselines)
    if open_sets:
        on.append(f"those of {', '.join(open_sets)} with your data's language and kind")
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
            short_reference(dataset.source.summary),
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
    """Estimate how often the stage trains on each record; empty if the number of records is
    unknown.
    """
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
                ", ".join(name for name in head.columns if name not in head.unread),
                ", ".join(head.unread),
                head.example,
            ]
        )
    heads = ["data set", "files", "rows", "rejected", "columns", "not read", "first row"]
    return Table(heads, rows, title="Rows that were read", align="llrrlll")


def _below_root(run: Run, found: AtHand) -> list[str]:
    """List data sets' relative paths that do not exist on this machine, probably because
    `data.root` is not set.
    """
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


def short_reference(reference: str) -> str:
    """Shorten a reference for a table: without its hash; one inside a package to the package's
    name.
    """
    body = reference.partition("?")[0]
    return body.removeprefix("pypi://").partition("/")[0] if body.startswith("pypi://") else body
