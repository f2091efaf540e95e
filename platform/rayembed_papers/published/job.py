"""Run the job that compares results with the papers' scores."""

import argparse
from collections.abc import Sequence

from rayembed.errors import ConfigError
from rayembed.pipeline.job import Job, JobContext, names_in, option
from rayembed_extras.comparison.job import (
    COMPARISON_OPTIONS,
    InPrint,
    check_choice,
    compare_models,
)
from rayembed_papers.published.columns import lines_of_air_bench, published
from rayembed_papers.published.figures import check_name, figures, labels


def in_print(models: Sequence[str]) -> InPrint:
    """Select models of the papers by their short names, for a comparison.

    Raises:
        ConfigError: no paper has figures of a model; names the nearest.
    """
    for model in models:
        check_name("model", model, labels())
    return InPrint(
        labels=tuple(labels()[model] for model in models),
        columns=lambda benchmark, lines: [published(model, benchmark, lines) for model in models],
        benchmarks=lines_of_air_bench(),
    )


def _read(args: argparse.Namespace) -> argparse.Namespace:
    check_choice(args)
    if not args.results and not args.published:
        raise ConfigError(
            "nothing to compare: name folders with results (--results), models of the papers "
            "(--published, see --list), or both"
        )
    if args.published and args.benchmark is None:
        raise ConfigError(
            "--published needs --benchmark NAME, because papers' scores can only be compared on "
            "a benchmark"
        )
    return args


def _compare(asked: argparse.Namespace, context: JobContext) -> None:
    compare_models(asked, context.out, in_print(asked.published))


def _list(context: JobContext) -> None:
    """Print the short names of the papers' models and the tables of their scores."""
    sources: dict[str, dict[str, None]] = {}
    for figure in figures(context.args.benchmark):
        place = f"{figure.benchmark}: {figure.source}"
        sources.setdefault(figure.model, {}).setdefault(place)
    for model, places in sources.items():
        context.out.write(f"{model}  ({labels()[model]})\n")
        context.out.writelines(f"    {place}\n" for place in places)


_PUBLISHED = option(
    "--published A,B",
    "models of the papers to show beside them, by the short names of --list",
    type=names_in,
    default=(),
)

run_comparison_with_papers = Job(
    options=(*COMPARISON_OPTIONS, _PUBLISHED),
    read=_read,
    run=_compare,
    lists=("the short names of the papers' models and their tables", _list),
    log=(__package__,),
)
"""The job that compares models by their results and the papers' scores."""
