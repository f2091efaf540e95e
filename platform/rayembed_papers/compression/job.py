"""Run the job that measures NV-Embed's Tables 6 to 8 at a small size, seed by seed."""

import argparse
import logging
import statistics
import time
from typing import TYPE_CHECKING

from rayembed.assets.storage import join, write_atomic
from rayembed.display.tables import console, show
from rayembed.pipeline.job import Job, JobContext, at_least, option
from rayembed.pipeline.storage import absolute_storage

if TYPE_CHECKING:
    from rayembed_papers.compression.measure import MeasuredCell

logger = logging.getLogger(__name__)

NUM_CELLS = 34
"""Scores of a seed: the base, 9 pruned models with 2 recoveries each, 6 quantised ones."""


def _measure(args: argparse.Namespace, context: JobContext) -> None:
    from rayembed_papers.compression.measure import measure
    from rayembed_papers.compression.report import ordering_table, score_table

    storage = absolute_storage(args.storage_path)
    began, until = time.monotonic(), args.minutes and args.minutes * 60
    scores: dict[int, dict[MeasuredCell, float]] = {}
    took: list[float] = []
    late = False
    given = {"layers": args.layers, "steps": args.steps, "storage": storage}
    cells = ((seed, found) for seed in range(args.seeds) for found in measure(seed, **given))
    for seed, (cell, score, seconds) in cells:
        scores.setdefault(seed, {})[cell] = score
        took.append(seconds)
        left = NUM_CELLS * args.seeds - len(took)
        logger.info(
            "seed %d, %s %s %s: score %.4f, measured in %.0f s; %d of %d scores are left, about "
            "%.0f minutes",
            *(seed, cell.method, cell.structure, cell.recovery, score, seconds),
            *(left, NUM_CELLS * args.seeds, left * statistics.mean(took) / 60),
        )
        late = until is not None and time.monotonic() - began > until
        if late:
            break
    tables = [score_table(scores), ordering_table(scores)]
    printer = console(context.out)
    for table in tables:
        printer.print(table)
    place = join(storage, "papers", "nvembed-tables6-8.md")
    write_atomic(place, "\n".join(show(table, "markdown") for table in tables).encode())
    context.out.write(f"Table {place}\n")
    if late:
        context.out.write("Next  the same command goes on with the rest\n")


run_compression_tables = Job(
    options=(
        option("--seeds N", "seeds 0 to N - 1", type=at_least(1), default=3),
        option("--layers N", "layers of MiniLM that are trained", type=at_least(1), default=3),
        option("--steps N", "steps of each training", type=at_least(1), default=100),
        option("--minutes N", "stop after so many; default: when all is done", type=at_least(1)),
        option("--storage-path FOLDER", "where runs and variants go", default="outputs"),
    ),
    read=lambda args: args,
    run=_measure,
    log=("rayembed_papers",),
)
"""The job that measures NV-Embed's Tables 6 to 8."""
