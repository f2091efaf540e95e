"""From a step of training back to the rows of its sources, as a table."""

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.lineage import folders_of, lineage
from rayembed.errors import RayembedError

_WIDTH = 140
_SHOWN_CHARACTERS = 60


def run_trace(argv: Sequence[str], *, about: str | None) -> int:
    """The exit code: 0, or 1 when there is no such plan, step or folder."""
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("plan", help="folder of a batch plan: storage_path/plans/STAGE-…")
    parser.add_argument("step", type=int, help="step of the stage, from 0")
    args = parser.parse_args(list(argv))
    try:
        print_trace(args.plan, args.step, sys.stdout)
    except RayembedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def print_trace(plan_folder: str, step: int, out: TextIO) -> None:
    """Write each row of the step with its origin, then the folders that the rows went through.

    Raises:
        DataError: no such step.
        ArtifactError: no such plan, or a folder that it was made of is gone.
    """
    plan = BatchPlan.open(plan_folder)
    rows = lineage(plan, step)
    records = plan.read(step)
    table = Table(title=f"Step {step} of plan {plan.fingerprint}", title_justify="left")
    table.add_column("slot", justify="right")
    for column in ("data set", "record", "made of", "query", "negatives"):
        table.add_column(column, overflow="fold")
    for row, record in zip(rows, records, strict=True):
        rules = sorted({negative.rule for negative in row.negatives})
        negatives = f"{len(row.negatives)} {', '.join(rules)}" if row.negatives else ""
        query = " ".join(record.query.split())[:_SHOWN_CHARACTERS]
        table.add_row(
            str(row.slot), row.dataset, row.record, "\n".join(row.origin), query, negatives
        )
    console = Console(
        file=out, width=None if out.isatty() else _WIDTH, highlight=False, markup=False
    )
    console.print(table)
    for name, chain in folders_of(plan).items():
        for prepared in chain:
            counts = f"{prepared.manifest['rows_in']:,} → {prepared.manifest['rows_out']:,} rows"
            console.print(f"{name}  {prepared.folder}  {counts}", soft_wrap=True)
