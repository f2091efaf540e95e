"""Run the job that compares models: read arguments and results, write tables and plots, suggest
commands.
"""

import argparse
import fnmatch
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

from rayembed.assets.storage import join, write_atomic
from rayembed.config.reports import chosen_findings
from rayembed.config.settings import nearest
from rayembed.display.tables import console
from rayembed.errors import ConfigError, StorageError
from rayembed.pipeline.evaluate.findings import (
    ComparedModels,
    Finding,
    make_findings,
    print_findings,
)
from rayembed.pipeline.evaluate.job import own_set
from rayembed.pipeline.job import Job, JobContext, names_in, option
from rayembed.results.scores import OTHER, Place, TaskScore
from rayembed_extras.comparison.benchmark_lines import Line, benchmark_lines, result_lines
from rayembed_extras.comparison.compare import Column, ModelComparison, compare, measured
from rayembed_extras.comparison.plots import category_bars, difference_dots
from rayembed_extras.comparison.results import StoredModel, read_model, stored_models
from rayembed_extras.comparison.tables import (
    category_table,
    comparison_csv,
    comparison_markdown,
    difference_table,
    task_tables,
)

ALL_TASKS = "all tasks with results"
"""Name used for all tasks when no benchmark is selected."""

Results = Mapping[StoredModel, Mapping[str, TaskScore]]


@dataclass(frozen=True)
class InPrint:
    """Models with scores published in papers, to compare with measured ones."""

    labels: tuple[str, ...] = ()
    """Labels of the models in tables."""
    columns: Callable[[str, Sequence[Line]], list[Column]] = lambda _benchmark, _lines: []
    """Columns with the models' figures on the lines of a benchmark."""
    benchmarks: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """Benchmarks that mteb does not have → their lines."""


def compare_models(
    asked: argparse.Namespace, out: TextIO, in_print: InPrint | None = None
) -> ModelComparison:
    """Compare models, print the tables and write the files.

    Args:
        asked: values of `COMPARISON_OPTIONS`.
        in_print: models to show beside those of the results; None: none.

    Raises:
        ConfigError: nothing to compare, a model, a benchmark or a baseline that is not there, or a
            price of 0 or less.
        ArtifactError: a results folder cannot be read, or the output not be written.
    """
    price = asked.price_per_hour
    if price is not None and not price > 0:
        raise ConfigError(f"--price-per-hour: {price:g} is not a price; give a number above 0")
    in_print = in_print or InPrint()
    results = _results(asked)
    if asked.benchmark is None:
        lines = result_lines(_places(results), _measures(results))
        benchmark = ALL_TASKS
    else:
        lines = benchmark_lines(asked.benchmark, in_print.benchmarks)
        benchmark = asked.benchmark
    labelled = dict(zip(_labels(list(results), in_print.labels), results.items(), strict=True))
    columns = [
        measured(model, files, benchmark, lines, label=label)
        for label, (model, files) in labelled.items()
    ]
    if price is not None:
        priced = [replace(column.cost, price_per_hour=price) for column in columns]
        columns = [replace(c, cost=cost) for c, cost in zip(columns, priced, strict=True)]
    columns += in_print.columns(benchmark, lines)
    comparison = compare(benchmark, lines, columns, _baseline(asked.baseline, labelled))
    written = write_comparison(comparison, asked.output)
    folders = {label: _folders(model) for label, (model, _) in labelled.items()}
    own_sets = {str(own["name"]): str(own["path"]) for own in asked.own_set}
    compared = ComparedModels(folders, comparison.baseline, asked.output, own_sets)
    findings = make_findings(compared, asked.findings)
    written += tuple(join(asked.output, name) for one in findings for name in one.files)
    _print(comparison, asked, written, out, findings)
    return comparison


def _folders(model: StoredModel) -> tuple[str, ...]:
    """Folders of a model's result files; if several have the same task, the first one counts."""
    return tuple(dict.fromkeys(address.rpartition("/")[0] for address in model.files))


def _places(results: Results) -> dict[str, list[Place]]:
    """Task → the splits and subsets on which at least one model has a score."""
    places: dict[str, list[Place]] = {}
    for files in results.values():
        for task, file in files.items():
            places.setdefault(task, []).extend(file.finite_scores)
    return places


def _measures(results: Results) -> dict[str, tuple[str, str]]:
    """Task → its category and the name of its main score, as the result files state them."""
    scores = [score for files in results.values() for score in files.values()]
    return {s.task: (s.category, s.metric) for s in scores if s.category != OTHER}


def write_comparison(comparison: ModelComparison, folder: str) -> tuple[str, ...]:
    """Write the comparison; return the addresses of `scores.md`, `scores.csv`, `categories.png`
    and, if a baseline shares tasks with a model, `differences.png`.

    Raises:
        StorageError: the folder cannot be written.
    """
    files = {
        "scores.md": comparison_markdown(comparison).encode(),
        "scores.csv": comparison_csv(comparison).encode(),
        "categories.png": category_bars(comparison),
        "differences.png": difference_dots(comparison),
    }
    written = []
    for name, data in files.items():
        if data is None:
            continue
        try:
            write_atomic(join(folder, name), data)
        except StorageError as error:
            raise StorageError(
                f"cannot write the comparison to {folder!r}: {error}. Make the folder writable, "
                "or choose another --output"
            ) from error
        written.append(join(folder, name))
    return tuple(written)


def check_choice(args: argparse.Namespace) -> None:
    """Raise if `--models` is given without `--results`, from which it selects.

    Raises:
        ConfigError: there are none.
    """
    if args.models and not args.results:
        raise ConfigError(
            "--models selects from stored results; name the folders of these results with --results"
        )


def _results(asked: argparse.Namespace) -> dict[StoredModel, dict[str, TaskScore]]:
    """Return the selected models with their results, in the order in which they were named."""
    if not asked.results:
        return {}
    stored = stored_models(asked.results)
    if not stored:
        raise ConfigError(
            f"--results: there are no result files of mteb below {', '.join(asked.results)}; "
            "expected FOLDER/results/<org>__<model>/<revision>/<Task>.json, as rayembed evaluate "
            "writes them"
        )
    results = {model: read_model(model) for model in choose(stored, asked.models)}
    _check_one_revision(results, asked.models)
    empty = [model for model, files in results.items() if not files]
    if empty:
        raise ConfigError(f"--results: {empty[0].name} has no result that can be read")
    return results


def choose(stored: Sequence[StoredModel], wanted: Sequence[str]) -> list[StoredModel]:
    """Select the models that match names or globs, without duplicates, in the order of the
    names.

    A name is `<org>/<model>`, the model alone, or either with `@` and the beginning of a revision.

    Raises:
        ConfigError: a name chooses none; names the nearest.
    """
    if not wanted:
        return list(stored)
    chosen: dict[StoredModel, None] = {}
    for name in wanted:
        found = [model for model in stored if _matches(model, name)]
        if not found:
            known = {known for model in stored for known in _names_of(model)}
            if "@" in name and any(_matches(model, name.partition("@")[0]) for model in stored):
                known = {f"{model.name}@{model.revision}" for model in stored}
            raise ConfigError(f"--models: no results of {name!r}; {nearest(name, known)}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _baseline(wanted: str | None, labelled: Mapping[str, tuple[StoredModel, object]]) -> str | None:
    """Resolve a name or glob of `--models` to the label of the compared model; any other name is
    returned unchanged.

    Raises:
        ConfigError: it chooses several models.
    """
    if wanted is None or wanted in labelled:
        return wanted
    chosen = [label for label, (model, _) in labelled.items() if _matches(model, wanted)]
    if len(chosen) > 1:
        raise ConfigError(
            f"--baseline: {wanted!r} chooses {len(chosen)} of the compared models, but only one "
            f"can be the baseline; name one of {', '.join(chosen)}"
        )
    return chosen[0] if chosen else wanted


def _matches(model: StoredModel, wanted: str) -> bool:
    name, _, revision = wanted.lower().partition("@")
    right_name = any(fnmatch.fnmatchcase(one.lower(), name) for one in _names_of(model))
    return right_name and fnmatch.fnmatchcase(model.revision.lower(), f"{revision}*")


def _names_of(model: StoredModel) -> tuple[str, str]:
    """Return the names that select a model: with its organisation and without."""
    return model.name, model.name.rpartition("/")[2]


def _check_one_revision(results: Results, wanted: Sequence[str]) -> None:
    """Raise if a model has results of several revisions and the user named none of them.

    Raises:
        ConfigError: it has; lists them with the dates of their results.
    """
    named = [name for name in wanted if "@" in name]
    by_name: dict[str, list[StoredModel]] = {}
    for model in results:
        if not any(_matches(model, name) for name in named):
            by_name.setdefault(model.name, []).append(model)
    for name, revisions in by_name.items():
        if len(revisions) < 2:
            continue
        lines = []
        for model in revisions:
            dates = [score.date for score in results[model].values() if score.date is not None]
            date = max(dates, default=None)
            when = "no date" if date is None else f"{date:%Y-%m-%d %H:%M}"
            lines.append(f"  {name}@{model.revision}  {len(results[model])} tasks, last {when}")
        raise ConfigError(
            f"{name} has results of {len(revisions)} revisions; choose with --models "
            f"{name}@REVISION (several, separated by commas, to compare them):\n" + "\n".join(lines)
        )


def _labels(models: Sequence[StoredModel], taken: Collection[str]) -> list[str]:
    """Choose short unique labels for the models, different from labels already in use."""
    short = [model.name.rpartition("/")[2] for model in models]
    labels = []
    for model, name in zip(models, short, strict=True):
        alike = [other for other, one in zip(models, short, strict=True) if one == name]
        ambiguous = name in taken or len({other.name for other in alike}) > 1
        label = model.name if ambiguous else name
        revisions = [other.revision for other in alike if other.name == model.name]
        shown = f"@{model.revision[: _telling(revisions)]}" if len(revisions) > 1 else ""
        labels.append(f"{label}{shown}")
    return labels


def _telling(revisions: Sequence[str]) -> int:
    """Return the shortest prefix length, at least ten, at which the revisions differ."""
    longest = max(map(len, revisions))
    lengths = range(10, longest)
    return next((n for n in lengths if len({r[:n] for r in revisions}) == len(revisions)), longest)


def _print(
    comparison: ModelComparison,
    asked: argparse.Namespace,
    written: Sequence[str],
    out: TextIO,
    findings: Sequence[Finding],
) -> None:
    printer = console(out)
    apart = difference_table(comparison, tasks=asked.tasks)
    tables = [category_table(comparison), *(task_tables(comparison) if asked.tasks else ())]
    for table in [*tables, *([] if apart is None else [apart])]:
        printer.print(table)
        printer.print()
    for note in comparison.notes:
        printer.print(note)
    print_findings(findings, out)
    for address in written:
        printer.print(f"Written  {address}", soft_wrap=True)
    for command in _next(comparison, asked):
        printer.print(f"Next     {command}", soft_wrap=True)


def _next(comparison: ModelComparison, asked: argparse.Namespace) -> list[str]:
    """Suggest commands that complete the comparison or show more of it."""
    commands = []
    for column in comparison.columns:
        missing = comparison.missing(column)
        if column.published or not missing:
            continue
        parts = ["rayembed", "evaluate", "--model", column.name]
        parts += (
            ["--benchmark", asked.benchmark]
            if asked.benchmark
            else ["--tasks", ",".join(dict.fromkeys(line.task for line in missing))]
        )
        commands.append(
            f"{shlex.join(parts)}  # {len(missing)} of {len(comparison.lines)} tasks are missing"
        )
    if not asked.tasks:
        commands.append("the same command with --tasks shows every task")
    return commands


def _read(args: argparse.Namespace) -> argparse.Namespace:
    check_choice(args)
    chosen_findings(args.findings)
    if not args.results:
        raise ConfigError("nothing to compare: name folders with results (--results)")
    return args


def _compare(asked: argparse.Namespace, context: JobContext) -> None:
    compare_models(asked, context.out)


def _findings(text: str) -> tuple[str, ...]:
    return () if text == "none" else names_in(text)


COMPARISON_OPTIONS = (
    option(
        "--results FOLDER",
        "folders or addresses of object storage with mteb's result files",
        nargs="+",
        default=[],
    ),
    option(
        "--models A,B",
        "names or globs of models that have results, as org/name@revision, where org/ and "
        "@revision may be left out; default: all",
        type=names_in,
        default=(),
    ),
    option(
        "--benchmark NAME",
        'one of mteb\'s benchmarks, as "MTEB(eng, v1)" or BEIR, or MIRACL; default: every task '
        "that has results",
    ),
    option(
        "--baseline NAME",
        "model from which differences are taken, named as for --models; default: the first one in "
        "print, else the first model",
    ),
    option(
        "--output FOLDER",
        "where scores.md, scores.csv, categories.png and differences.png go",
        default="outputs/comparison",
    ),
    option(
        "--price-per-hour PRICE",
        "of one worker, for the price of a million documents; default: as stored with the results",
        type=float,
    ),
    option("--tasks", "print every task, not categories only"),
    option(
        "--own-set [NAME=]FOLDER",
        "folder of an own set that the models were scored on, for findings that read its texts",
        often=True,
        type=own_set,
    ),
    option(
        "--findings A,B",
        "findings about the scores to show; default: all that are installed, none: no finding",
        type=_findings,
    ),
)
"""Options of a comparison of results."""

run_compare_job = Job(options=COMPARISON_OPTIONS, read=_read, run=_compare)
"""The job that compares models by their result files."""
