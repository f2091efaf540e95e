"""Table of the rows of its sources that a step of training comes from."""

from typing import TextIO

from rayembed.config.run import Run, of_stages
from rayembed.data.plan.audit import folders_of, lineage
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.display.tables import Table, console
from rayembed.pipeline.run.folders import plan_of

_SHOWN_CHARACTERS = 60


def print_trace(run: Run, stage: str, step: int, out: TextIO) -> None:
    """Write each row of a stage's step with its origin, then the folders that they went through.

    Raises:
        ArtifactError: no training of that name has a plan of the stage, or a folder that it was
            made of is gone.
        ConfigError: the run has no such stage.
        DataError: the plan has no such step.
    """
    of_stages(run, [stage])
    plan = BatchPlan.open(plan_of(run, stage))
    rows = lineage(plan, step)
    records = plan.read(step)
    shown = []
    for row, record in zip(rows, records, strict=True):
        rules = sorted({negative.rule for negative in row.negatives})
        negatives = f"{len(row.negatives)} {', '.join(rules)}" if row.negatives else ""
        query = " ".join(record.query.split())[:_SHOWN_CHARACTERS]
        shown.append([row.slot, row.dataset, row.record, "\n".join(row.origin), query, negatives])
    heads = ["slot", "data set", "record", "made of", "query", "negatives"]
    title = f"Step {step} of plan {plan.fingerprint}"
    printer = console(out)
    printer.print(Table(heads, shown, title=title, align="rl"))
    for name, chain in folders_of(plan).items():
        for prepared in chain:
            counts = f"{prepared.manifest['rows_in']:,} → {prepared.manifest['rows_out']:,} rows"
            printer.print(f"{name}  {prepared.folder}  {counts}", soft_wrap=True)
