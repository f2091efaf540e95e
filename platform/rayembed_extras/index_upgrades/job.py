"""Run the upgrade job, from its command-line arguments to tables, a switch and an exit code."""

import argparse

from rayembed.pipeline.job import Job, JobContext, Reader, option
from rayembed_extras.index_upgrades.settings import NO_MODEL, UpgradeRun

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
            missing="no new model: give --model; or --rollback, --drop or --forget-adapter",
        ),
        option(
            "--queries PATH",
            "judged queries: a folder in BEIR's layout, or rows of query and document or positive; "
            "without them first sentences of documents",
            sets="queries",
        ),
        option(
            "--documents PATH",
            "files of the documents for a backfill, of the form that `rayembed index` had; without "
            "them the texts in the store",
            sets="documents",
        ),
        option(
            "--query-encoder",
            "the new model embeds queries alone; documents stay with the index's own model",
            sets="query_encoder",
        ),
        option(
            "--storage-path FOLDER",
            "folder or object storage with the record of the index; default: outputs",
            sets="placement.storage_path",
        ),
        option(
            "--keep SHARE",
            "share of full re-embedding's recall@10 that is enough for a road without it, 0.97 by "
            "default",
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
    """Read the settings; those of `--rollback`, `--drop` and `--forget-adapter` need no model."""
    alone = args.rollback or args.drop or args.forget_adapter
    if args.model is None and args.recipe is None and alone:
        args.model = NO_MODEL
    return _READER(args)


def _upgrade(run: UpgradeRun, context: JobContext) -> int:
    # torch; the store's client.
    from rayembed_extras.index_upgrades.calls import print_upgraded
    from rayembed_extras.index_upgrades.upgrade import upgrade

    print_upgraded(upgrade(run, context.args.road), context.out)
    return 0


def _roll_back(run: UpgradeRun, context: JobContext) -> None:
    from rayembed_extras.index_upgrades.calls import roll_back_index

    context.out.write(f"{roll_back_index(run)}\n")


def _drop(run: UpgradeRun, context: JobContext) -> None:
    from rayembed_extras.index_upgrades.calls import drop_old_tables

    context.out.write(f"{drop_old_tables(run)}\n")


def _forget(run: UpgradeRun, context: JobContext) -> None:
    from rayembed_extras.index_upgrades.calls import forget_adapters_of

    context.out.write(f"{forget_adapters_of(run)}\n")


def _show(run: UpgradeRun, context: JobContext) -> None:
    """Print the resolved settings, and what the index's record says of the upgrade."""
    from rayembed_extras.index_upgrades.price import measured_texts
    from rayembed_extras.index_upgrades.switch import known_index
    from rayembed_extras.index_upgrades.upgrade import storage_of
    from rayembed_extras.indexing.judged_queries import find_queries

    manifest = known_index(storage_of(run), run.name)
    if run.queries is not None:
        find_queries(run.queries, run.split)
    context.out.write(f"# upgrade, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    context.out.flush()
    record = manifest.tables[str(manifest.current)]
    made, tell = record.made_by, context.err.write
    tell(f"index {run.name}: table {manifest.current}, {record.rows:,} rows, made by ")
    tell(f"{made.reference} ({made.weights}, {made.dimensions} dimensions, {made.number_type})\n")
    if not run.query_encoder:
        tell(f"to measure: {measured_texts(run, record)}\n")
        tell(f"for a backfill: all {record.rows:,} texts by {run.model}, without measuring\n")
        if run.price_per_hour is not None:
            tell("prices come with the measurement, which times the models; a backfill's alone: ")
            tell(f"rayembed index --documents PATH --model {run.model} --name {run.name} ")
            tell(f"--price-per-hour {run.price_per_hour:g} --dry-run\n")
    for table, each in manifest.tables.items():
        if not each.complete:
            tell(f"{table} is half-filled by {each.made_by.reference}\n")


run_upgrade_job = Job(
    options=(
        *_READER.options,
        option(
            "--road {compatible,adapter,backfill,auto}",
            "do it: new queries as they are, a map of queries, all documents embedded again, or "
            "the recommended one; default: measure and recommend only",
        ),
    ),
    read=_read,
    run=_upgrade,
    instead=(
        (option("--rollback", "let the name refer to the former table again"), _roll_back),
        (option("--drop", "remove all tables but the current one"), _drop),
        (
            option(
                "--forget-adapter",
                "remove the adapters of the current table; with --model that model's alone",
            ),
            _forget,
        ),
    ),
    shows=("the upgrade", "what the index's record says", _show),
    example="--name support --model all-MiniLM-L6-v2",
)
"""The job that changes the model of an index."""
