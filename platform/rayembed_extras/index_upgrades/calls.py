"""`rayembed.upgrade`, and what it and the job do alike; torch is loaded when it is called."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rayembed.errors import ConfigError

if TYPE_CHECKING:
    from rayembed_extras.index_upgrades.settings import Road, UpgradeRun
    from rayembed_extras.index_upgrades.upgrade import Upgraded


def upgrade(
    name: str,
    model: Any = None,
    *,
    road: "Road | None" = None,
    queries: Any = None,
    documents: Any = None,
    query_encoder: bool = False,
    keep: float = 0.97,
    price_per_hour: float | None = None,
    rollback: bool = False,
    drop: bool = False,
    forget_adapter: bool = False,
    output: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> "Upgraded | None":
    """Measure the roads of an index to a new model, and take one; or go back, remove old tables, or
    an adapter.

    Args:
        name: of the index.
        model: the new model, as `rayembed.index` takes it.
        road: `compatible`, `adapter`, `backfill` or `auto`; None: measure and recommend only.
            `backfill` measures nothing.
        queries: judged queries: a path, or rows of `query` and `document` or `positive`.
        documents: for a backfill: a path, or what `rayembed.index` had; None: the store's texts.
        query_encoder: whether the new model embeds queries alone.
        keep: share of full re-embedding's recall@10 that is enough for a road without it.
        price_per_hour: of one worker, in any currency.
        rollback: let the name refer to the former table again, without a model.
        drop: remove all tables but the current one, without a model.
        forget_adapter: remove the model's adapter for the current table, without a model all.
        output: folder or address of object storage with the record of the index.
        settings: further settings by path, as those of the job's `--set`.

    Returns:
        The report with its recommendation and, as `roads`, the table, each None after a backfill
        without a stored measurement; None: after `rollback`, `drop` or `forget_adapter`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed.api.calls import assignments_of, check_addresses, shown
    from rayembed.config.override import overridden
    from rayembed.data.given_rows import rows_file
    from rayembed.display.tables import console
    from rayembed.pipeline.storage import absolute_storage
    from rayembed_extras.index_upgrades.settings import NO_MODEL, UpgradeRun
    from rayembed_extras.indexing.calls import model_reference, rows_with_text

    check_addresses(output=output, settings=settings or {}, model=model, name=name)
    alone = rollback + drop + forget_adapter
    if alone > 1 or ((model is None) != bool(alone) and not forget_adapter):
        raise ConfigError(
            "give one of model, rollback=True, drop=True and forget_adapter=True; the last with or "
            "without model"
        )
    storage = absolute_storage(str(output))
    values = {
        "name": name,
        "model": NO_MODEL if model is None else model_reference(model),
        "queries": None if queries is None else rows_file(queries, storage),
        "documents": None if documents is None else rows_file(rows_with_text(documents), storage),
        "query_encoder": query_encoder,
        "keep": keep,
        "price_per_hour": price_per_hour,
        "placement": {"storage_path": storage},
    }
    run = overridden(UpgradeRun, values, assignments_of(settings or {}))
    with shown():
        if alone:
            act = roll_back_index if rollback else drop_old_tables if drop else forget_adapters_of
            console().print(act(run), soft_wrap=True)
            return None
        from rayembed_extras.index_upgrades import upgrade as work

        made = work.upgrade(run, road)
        print_upgraded(made)
    return made


def roll_back_index(run: "UpgradeRun") -> str:
    """Let an index's name refer to its former table; return lines that say so."""
    from rayembed_extras.index_upgrades.switch import known_index, roll_back
    from rayembed_extras.index_upgrades.upgrade import locked, register_upgrade, storage_of

    storage = storage_of(run)
    with locked(storage, run.name):
        before = known_index(storage, run.name)
        former, now = roll_back(storage, run.name)
        register_upgrade(run, storage, before)
        tables = known_index(storage, run.name).tables
    line = f"Switched   {run.name} refers to {now}; {former} is kept until --drop"
    if tables[now].updated < tables[former].updated:
        line += (
            f"\nUpdate     {now} has the documents of {tables[now].updated}, {former} those of "
            f"{tables[former].updated}; if they changed since: rayembed index --documents PATH "
            f"--model {tables[now].made_by.reference} --name {run.name} --update"
        )
    return line


def drop_old_tables(run: "UpgradeRun") -> str:
    """Remove all tables of an index but the current one; return a line that names them."""
    from rayembed_extras.index_upgrades.switch import drop_begun, drop_tables, known_index
    from rayembed_extras.index_upgrades.upgrade import locked, register_upgrade, storage_of
    from rayembed_extras.indexing.manifest import read_manifest

    storage = storage_of(run)
    with locked(storage, run.name):
        begun = read_manifest(storage, run.name)
        if begun is not None and begun.current is None:
            return f"Dropped    {', '.join(drop_begun(storage, begun))}"
        before = known_index(storage, run.name)
        gone = drop_tables(storage, run.name)
        register_upgrade(run, storage, before)
    return f"Dropped    {', '.join(gone)}"


def forget_adapters_of(run: "UpgradeRun") -> str:
    """Remove the adapter of the run's model, or all without one; return a line that names them."""
    from rayembed_extras.index_upgrades.models import model_folder, weights_of
    from rayembed_extras.index_upgrades.settings import NO_MODEL
    from rayembed_extras.index_upgrades.switch import forget_adapters, mended
    from rayembed_extras.index_upgrades.upgrade import locked, register_upgrade, storage_of

    storage, weights = storage_of(run), None
    if run.model != NO_MODEL:
        weights = weights_of(model_folder(run.model, storage, run.tracking_uri))
    with locked(storage, run.name):
        before = mended(storage, run.name)
        gone = forget_adapters(storage, before, weights)
        register_upgrade(run, storage, before)
    which = " and ".join(gone)
    return f"Removed    adapter {which} from {before.current}, which refuses such queries again"


def print_upgraded(done: "Upgraded", out: TextIO | None = None) -> None:
    """Print tables, notes, the recommendation and what was done."""
    from rayembed.display.tables import console
    from rayembed_extras.index_upgrades.report import prices_table

    screen, lines = console(out), []
    if done.roads is not None:
        screen.print(done.roads)
    if done.prices:
        screen.print(prices_table(done.prices))
    if done.report is not None:
        cost = done.report.measuring
        lines.append(
            f"Measured   {cost.texts:,} texts embedded by both models, and all maps fitted in "
            f"{cost.fit_seconds:.0f} s: {cost.seconds:,.0f} s in all"
        )
        if done.report.map_microseconds is not None:
            took = f"{done.report.map_microseconds:.0f} microseconds a query"
            lines.append(f"Map        {done.report.best}, {took}")
        lines += [f"Note       {note}" for note in done.report.notes]
    if done.recommended is not None:
        lines.append(f"Recommend  {done.recommended.sentence}")
    lines += [f"Report     {path}" for path in done.written]
    for line in (*lines, *done.lines):
        screen.print(line, soft_wrap=True)
