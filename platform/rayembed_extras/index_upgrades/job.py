"""Run the upgrade job, from its command-line arguments to tables, a switch and an exit code."""

import argparse
from typing import TYPE_CHECKING

from rayembed.pipeline.job import Job, JobContext, Reader, option
from rayembed_extras.index_upgrades.settings import UpgradeRun

if TYPE_CHECKING:
    from rayembed_extras.index_upgrades.upgrade import Upgraded

_READER = Reader(
    kind=UpgradeRun,
    base=UpgradeRun.read,
    examples="fit_documents=2000",
    own=(
        option("--name INDEX", "name of the index", sets="name", missing="no index: give --name"),
        option(
            "--model REFERENCE",
            "the new model: a folder, models:/name@alias, hf://…, s3://… or a short name",
            sets="model",
            missing="no new model: give --model; or --rollback or --drop",
        ),
        option(
            "--queries PATH",
            "judged queries: a folder in BEIR's layout, or rows of query and document or positive; "
            "without them first sentences of documents",
            sets="queries",
        ),
        option(
            "--documents PATH",
            "files of the documents for a backfill, as `rayembed index` had them; without them the "
            "texts in the store",
            sets="documents",
        ),
        option(
            "--keep SHARE",
            "share of full re-embedding's recall@10 that recommends an adapter, 0.97 by default",
            sets="keep",
            type=float,
        ),
        option(
            "--price-per-hour PRICE",
            "of one worker, for the price of each road",
            sets="price_per_hour",
            type=float,
        ),
    ),
)


def _read(args: argparse.Namespace) -> UpgradeRun:
    """Read the settings; those of `--rollback` and `--drop` need no model."""
    if args.model is None and args.recipe is None and (args.rollback or args.drop):
        args.model = "none"
    return _READER(args)


def _upgrade(run: UpgradeRun, context: JobContext) -> int:
    # torch; the store's client.
    from rayembed_extras.index_upgrades.upgrade import upgrade

    _print(upgrade(run, context.args.road), context)
    return 0


def _print(done: "Upgraded", context: JobContext) -> None:
    from rayembed.display.tables import console
    from rayembed_extras.index_upgrades.report import prices_table, roads_table

    screen = console(context.out)
    screen.print(roads_table(done.report))
    screen.print(prices_table(done.prices))
    if done.report.map_microseconds is not None:
        took = f"{done.report.map_microseconds:.0f} microseconds a query"
        context.out.write(f"Map        {done.report.best}, {took}\n")
    for note in done.report.notes:
        context.out.write(f"Note       {note}\n")
    context.out.write(f"Recommend  {done.recommended.sentence}\n")
    for path in done.written:
        context.out.write(f"Report     {path}\n")
    for line in done.lines:
        context.out.write(f"{line}\n")


def _roll_back(run: UpgradeRun, context: JobContext) -> None:
    from rayembed_extras.index_upgrades.switch import known_index, roll_back
    from rayembed_extras.index_upgrades.upgrade import locked, register_upgrade, storage_of

    storage = storage_of(run)
    with locked(storage, run.name):
        before = known_index(storage, run.name)
        former, now = roll_back(storage, run.name)
        register_upgrade(run, storage, before)
    context.out.write(f"Switched   {run.name} refers to {now}; {former} is kept until --drop\n")


def _drop(run: UpgradeRun, context: JobContext) -> None:
    from rayembed_extras.index_upgrades.switch import drop_tables, known_index
    from rayembed_extras.index_upgrades.upgrade import locked, register_upgrade, storage_of

    storage = storage_of(run)
    with locked(storage, run.name):
        before = known_index(storage, run.name)
        gone = drop_tables(storage, run.name)
        register_upgrade(run, storage, before)
    context.out.write(f"Dropped    {', '.join(gone)}\n")


def _show(run: UpgradeRun, context: JobContext) -> None:
    """Print the resolved settings, and what the index's record says of the upgrade."""
    from rayembed_extras.index_upgrades.judged import find_queries
    from rayembed_extras.index_upgrades.switch import known_index
    from rayembed_extras.index_upgrades.upgrade import storage_of

    manifest = known_index(storage_of(run), run.name)
    if run.queries is not None:
        find_queries(run.queries, run.split)
    context.out.write(f"# upgrade, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    context.out.flush()
    record = manifest.tables[str(manifest.current)]
    made, tell = record.made_by, context.err.write
    sample = min(record.documents_read or record.rows, run.fit_documents + run.searched_documents)
    tell(f"index {run.name}: table {manifest.current}, {record.rows:,} rows, made by ")
    tell(f"{made.reference} ({made.weights}, {made.dimensions} dimensions, {made.number_type})\n")
    tell(f"embeds {sample:,} documents by {run.model} to measure; all of them for a backfill\n")
    for table, each in manifest.tables.items():
        if not each.complete:
            tell(f"{table} is half-filled by {each.made_by.reference}\n")


run_upgrade_job = Job(
    options=(
        *_READER.options,
        option(
            "--road {adapter,backfill,auto}",
            "do it: a map of queries, all documents embedded again, or the recommended one; "
            "default: measure and recommend only",
        ),
    ),
    read=_read,
    run=_upgrade,
    instead=(
        (option("--rollback", "let the name refer to the former table again"), _roll_back),
        (option("--drop", "remove all tables but the current one"), _drop),
    ),
    shows=("the upgrade", "what the index's record says", _show),
    example="--name support --model all-MiniLM-L6-v2",
)
"""The job that changes the model of an index."""
