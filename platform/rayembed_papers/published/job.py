"""The comparison of results with the papers' figures: from its arguments to tables and plots."""

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

from rayembed.errors import ConfigError
from rayembed.pipeline.command_line import exit_code, log_to_stderr
from rayembed.pipeline.compare_job import (
    Asked,
    InPrint,
    asked_comparison,
    compare_models,
    comparison_parser,
    listed_names,
)
from rayembed_papers.published.columns import lines_of_air_bench, published
from rayembed_papers.published.figures import check_name, figures, labels


def run_comparison_with_papers(argv: Sequence[str], *, about: str | None) -> int:
    """The exit code of the job: 0, 1 when it failed, 2 when it was asked wrongly.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> None:
        args = _parser(about).parse_args(list(argv))
        if args.list:
            print_published(args.benchmark, sys.stdout)
            return
        log_to_stderr(__package__)
        asked, models = asked_comparison(args), listed_names(args.published)
        _check(asked, models)
        compare_models(asked, sys.stdout, in_print(models))

    return exit_code(work)


def in_print(models: Sequence[str]) -> InPrint:
    """Models of the papers, by their short names, for a comparison.

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


def print_published(benchmark: str | None, out: TextIO) -> None:
    """Write the short names of the papers' models and where their figures stand.

    Raises:
        ConfigError: no paper has figures of that benchmark.
    """
    sources: dict[str, dict[str, None]] = {}
    for figure in figures(benchmark):
        place = f"{figure.benchmark}: {figure.source}"
        sources.setdefault(figure.model, {}).setdefault(place)
    for model, places in sources.items():
        out.write(f"{model}  ({labels()[model]})\n")
        out.writelines(f"    {place}\n" for place in places)


def _check(asked: Asked, models: Sequence[str]) -> None:
    if not asked.results and not models:
        raise ConfigError(
            "nothing to compare: name folders with results (--results), models of the papers "
            "(--published, see --list), or both"
        )
    if models and asked.benchmark is None:
        raise ConfigError(
            "--published needs --benchmark NAME: what papers print needs a benchmark to be "
            "compared on"
        )


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = comparison_parser(about)
    parser.add_argument(
        "--published",
        metavar="A,B",
        help="models of the papers to show beside them, by the short names of --list",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the short names of the papers' models and their tables; compare nothing",
    )
    return parser
