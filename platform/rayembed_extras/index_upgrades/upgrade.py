"""Upgrade an index to a new model: check, measure, recommend, and take a road."""

import logging
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rayembed.assets.storage import join
from rayembed.config.document import fingerprint
from rayembed.display.progress import doing
from rayembed.display.tables import Table, show
from rayembed.errors import ConfigError, RayembedError
from rayembed.evaluation.own_data import OwnFiles
from rayembed.models.loading.load import saved_widths
from rayembed.pipeline.job import work_begins
from rayembed.pipeline.storage import absolute_storage
from rayembed_extras.index_upgrades.backfill import (
    backfill,
    check_backfill,
    check_begun,
    texts_of_rows,
)
from rayembed_extras.index_upgrades.compare import MEASUREMENT, compare_roads
from rayembed_extras.index_upgrades.maps import identity_map, load_map
from rayembed_extras.index_upgrades.models import (
    UpgradeModel,
    fixed_reference,
    load_upgrade_model,
    model_folder,
    registry_of,
    weights_of,
)
from rayembed_extras.index_upgrades.price import (
    MeasuringCost,
    RoadPrice,
    price_roads,
    vector_bytes,
)
from rayembed_extras.index_upgrades.query_encoder import compare_query_encoder
from rayembed_extras.index_upgrades.report import (
    MAP_FOLDER,
    Recommendation,
    UpgradeReport,
    read_report,
    recommend,
    road_rows,
    roads_table,
    write_report,
)
from rayembed_extras.index_upgrades.sample import Texts, draw_sample
from rayembed_extras.index_upgrades.settings import Road, UpgradeRun
from rayembed_extras.index_upgrades.switch import (
    OpenIndex,
    check_updated,
    known_index,
    mended,
    open_index,
    record_adapter,
)
from rayembed_extras.indexing.judged_queries import find_queries, read_queries
from rayembed_extras.indexing.layout import layout_of
from rayembed_extras.indexing.lock import locked_index as locked
from rayembed_extras.indexing.manifest import MadeBy, Manifest
from rayembed_extras.indexing.registration import register_index

logger = logging.getLogger(__name__)

__all__ = ["Upgraded", "locked", "register_upgrade", "storage_of", "upgrade"]

_NOT_MEASURED = {
    *("keep", "price_per_hour", "tracking_uri", "rows_per_part", "placement", "documents"),
    "store_index",
}
"""Settings that do not change what is measured."""
_NOT_COMPARED = (
    "the roads were not measured, as --road backfill needs no measurement; to measure them before "
    "a backfill: the same command without --road"
)


@dataclass(frozen=True)
class Upgraded:
    """Result of an upgrade job; an explicit backfill measures nothing."""

    report: UpgradeReport | None = None
    """Measured roads; None: no measurement was made or stored."""
    prices: tuple[RoadPrice, ...] = ()
    """Prices of the measured roads, with money where a price per hour is stated."""
    recommended: Recommendation | None = None
    """None without a report."""
    written: tuple[str, ...] = ()
    """Addresses of the report's files."""
    lines: tuple[str, ...] = ()
    """Lines that say what was done."""

    @property
    def roads(self) -> Table | None:
        """Table of all measured roads; None without a report."""
        return None if self.report is None else roads_table(self.report)

    def _repr_markdown_(self) -> str:
        parts = [] if self.roads is None else [show(self.roads, "markdown")]
        if self.recommended is not None:
            parts.append(self.recommended.sentence)
        return "\n".join([*parts, *self.lines])


@dataclass(frozen=True)
class _Checked:
    """What was checked before the work begins."""

    index: OpenIndex
    folder: Path
    weights: str
    files: OwnFiles | None

    def key(self, run: UpgradeRun) -> str:
        """Fingerprint of everything that the measurement depends on."""
        record = self.index.record
        return fingerprint(
            [
                run.model_dump(mode="json", exclude=_NOT_MEASURED),
                [self.index.table, record.updated, record.rows, record.made_by.weights],
                [self.weights, self.files and self.files.key, MEASUREMENT],
            ]
        )


def storage_of(run: UpgradeRun) -> str:
    """Absolute storage path of an upgrade."""
    return absolute_storage(run.placement.storage_path)


def upgrade(run: UpgradeRun, road: Road | None = None) -> Upgraded:
    """Measure the roads of an upgrade, recommend one, and take the given one.

    The measurement is stored; a call with the same index, model and settings reads it. A backfill
    needs none: without a stored one nothing is measured.

    Args:
        road: None: measure and recommend only.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    storage = storage_of(run)
    with locked(storage, run.name):
        before = known_index(storage, run.name)
        mended(storage, run.name)
        index = open_index(storage, run.name)
        with closing(index.store):  # a folder of Qdrant opens once
            checked = _check(run, index, road)
            work_begins()
            folder = join(checked.index.folder, "upgrades", checked.key(run))
            report = read_report(folder)
            if report is None and road != "backfill":
                with doing("measuring the roads"):
                    report = _measured(run, checked, folder)
            done, chosen = Upgraded(), road
            if report is None:
                logger.info(_NOT_COMPARED)
            else:
                done = _recommended(run, report, folder)
                if road == "auto" and done.recommended is not None:
                    chosen = done.recommended.road
            lines: tuple[str, ...] = ()
            if report is not None and chosen in ("adapter", "compatible"):
                lines = _take_adapter(run, checked, report, folder, chosen)
                register_upgrade(run, storage, before)
        if chosen == "backfill":
            lines = backfill(run, storage, checked.weights)
            register_upgrade(run, storage, before)
    return replace(done, lines=lines)


def _recommended(run: UpgradeRun, report: UpgradeReport, folder: str) -> Upgraded:
    """Recommend a road by a report, and write the report's files."""
    recommended = recommend(report, run.keep)
    prices = tuple(price.with_money(run.price_per_hour) for price in report.prices)
    written = write_report(folder, report, recommended.sentence, prices)
    return Upgraded(report, prices, recommended, tuple(written))


def register_upgrade(run: UpgradeRun, storage: str, before: Manifest) -> None:
    """Name the index in the registry as its record has it now; see `register_index`.

    Args:
        before: record of the index before the job.
    """
    after = known_index(storage, run.name)
    register_index(before, after, storage, run.tracking_uri)


def _check(run: UpgradeRun, index: OpenIndex, road: Road | None) -> _Checked:
    """Check everything that can be known before a model is loaded.

    Raises:
        ConfigError: the index has this model already, or another upgrade or an update is half done.
        RayembedError: the index, its store, the model or the queries are missing or damaged.
    """
    check_updated(index)
    made = index.record.made_by
    files = None if run.queries is None else find_queries(run.queries, run.split)
    if run.query_encoder and road in ("adapter", "backfill"):
        raise ConfigError(
            f"a query encoder embeds no documents, which --road {road} needs; its one road is "
            "compatible. Leave --query-encoder out to let the new model embed documents, too"
        )
    embeds = road in ("backfill", "auto") and not run.query_encoder
    if embeds or not layout_of(index.record).has_text:
        check_backfill(run, index.record)
    folder = model_folder(run.model, index.storage, run.tracking_uri)
    weights = weights_of(folder)
    if road == "compatible" or run.query_encoder:
        _check_width(run, folder, made)
    if weights == made.weights:
        _check_changed(run, made, road)
    former = index.manifest.tables.get(index.manifest.before or "")
    width = run.dimensions or saved_widths(folder)[0]
    asked = (weights, width, run.instruction)
    by = former and (former.made_by.weights, former.made_by.dimensions, former.made_by.instruction)
    if former is not None and former.complete and by == asked:
        raise ConfigError(
            f"the former table {index.manifest.before!r} of {run.name!r} was made by this model; "
            f"go back to it by: rayembed upgrade --name {run.name} --rollback"
        )
    for table, record in index.half_filled.items():
        if record.made_by.weights != weights or road in ("adapter", "compatible"):
            raise ConfigError(
                f"a backfill of {run.name!r} by {record.made_by.reference} "
                f"({record.made_by.weights}) into {table!r} is half done; finish it by the same "
                f"command with --road backfill, or remove it: rayembed upgrade --name {run.name} "
                "--drop"
            )
    if embeds:
        check_begun(run, index, weights, width)
    return _Checked(index, folder, weights, files)


def _check_width(run: UpgradeRun, folder: Path, made: MadeBy) -> None:
    """Raise unless the new model's queries have as many dimensions as the index's vectors.

    Raises:
        ConfigError: they do not, or no map is measured.
    """
    width = run.dimensions or saved_widths(folder)[0]
    if width != made.dimensions:
        raise ConfigError(
            f"{run.model} gives vectors of {width} dimensions, but the index {run.name!r} has "
            f"{made.dimensions}, so that its queries do not fit as they are; take --road adapter, "
            "or --set dimensions=… if the model was trained for fewer"
        )
    if "identity" not in run.maps:
        raise ConfigError("the road compatible is measured as no map: add `identity` to maps")


def _check_changed(run: UpgradeRun, made: MadeBy, road: Road | None) -> None:
    """Raise unless the index's own model is to embed the documents again in another way.

    Raises:
        ConfigError: nothing is to be done, or a map is asked for, which only another model needs.
    """
    same = run.dimensions in (None, made.dimensions) and run.instruction == made.instruction
    if same or road != "backfill":
        what = "there is nothing to upgrade" if same else "other settings need --road backfill"
        raise ConfigError(
            f"the index {run.name!r} was made by this very model ({made.reference}, "
            f"{made.weights}): {what}"
        )


def _measured(run: UpgradeRun, checked: _Checked, folder: str) -> UpgradeReport:
    """Measure all roads, save the best map, and return the report."""
    began = time.perf_counter()
    index, record = checked.index, checked.index.record
    made = record.made_by
    layout, files = layout_of(record), checked.files
    judged = None
    if files is not None:
        judged = read_queries(files, index.store, index.table, has_text=layout.has_text)
    sample = draw_sample(
        index.store,
        index.table,
        layout,
        judged=set() if judged is None else judged.documents,
        searched=run.searched_documents,
        fits=run.fit_documents if run.fits_maps else 0,
        seed=run.seed,
        texts=_texts(run, index),
    )
    new = load_upgrade_model(
        checked.folder,
        checked.weights,
        run.model,
        dtype=run.dtype,
        instruction=run.instruction,
        query_instruction=run.query_instruction,
        dimensions=run.dimensions,
        use_gpu=run.placement.use_gpu,
    )
    old = _old_model(run, checked)
    compare = compare_query_encoder if run.query_encoder else compare_roads
    measured = compare(run, sample, old, new, judged)
    best = measured.best
    models = [new] if old is None else [new, old]
    cost = MeasuringCost(
        sum(model.embedded for model in models),
        sum(model.embedded_tokens for model in models),
        time.perf_counter() - began,
        sum(road.seconds for road in measured.roads),
    )
    prices: list[RoadPrice] = []
    if not run.query_encoder:
        prices = price_roads(
            new.rate,
            rows=sample.rows,
            measuring=cost,
            old_bytes=vector_bytes(sample.rows, made.dimensions, made.number_type),
            new_bytes=vector_bytes(sample.rows, new.width, made.number_type),
            map_bytes=0 if best is None else best.num_bytes,
        )
    report = UpgradeReport(
        index.name,
        index.table,
        made.reference,
        run.model,
        made.weights,
        checked.weights,
        (new.width, made.dimensions),
        road_rows(measured),
        None if best is None else best.kind,
        measured.judged,
        measured.num_queries,
        measured.searched,
        measured.documents,
        measured.rows,
        measured.fit_rows,
        measured.notes,
        tuple(prices),
        None if best is None else best.microseconds(),
        cost,
        run.query_encoder,
    )
    if best is not None:
        best.save(join(folder, MAP_FOLDER))
    return report


def _texts(run: UpgradeRun, index: OpenIndex) -> Texts | None:
    """Function that reads the texts of rows from the documents' files; None if the store keeps
    them.
    """
    if layout_of(index.record).has_text:
        return None
    uri = registry_of(index.record.made_by.reference, index.storage, run.tracking_uri)
    return lambda ids: texts_of_rows(index.record, str(run.documents), ids, uri)


def _old_model(run: UpgradeRun, checked: _Checked) -> UpgradeModel | None:
    """Load the model that made the index; None if it is not there, which the report says.

    Raises:
        ConfigError: `old_model` names another model than the record.
    """
    made = checked.index.record.made_by
    reference = run.old_model or made.reference
    try:
        folder = model_folder(reference, checked.index.storage, run.tracking_uri)
        weights = weights_of(folder)
    except RayembedError as error:
        if run.old_model is not None:
            raise
        logger.warning("the index's model %s cannot be read: %s", reference, error)
        return None
    if weights != made.weights:
        message = (
            f"{reference!r} has the fingerprint {weights}, but the index {run.name!r} was made by "
            f"{made.weights}; name its model: --set old_model=…"
        )
        if run.old_model is not None:
            raise ConfigError(message)
        logger.warning("the index's own queries are not measured: %s", message)
        return None
    return load_upgrade_model(
        folder,
        weights,
        reference,
        dtype=made.dtype,
        instruction=made.instruction,
        query_instruction=made.query_instruction,
        dimensions=made.dimensions,
        use_gpu=run.placement.use_gpu,
    )


def _take_adapter(
    run: UpgradeRun,
    checked: _Checked,
    report: UpgradeReport,
    folder: str,
    road: str,
) -> tuple[str, ...]:
    """Record the best map, or none for a compatible model, with the share that it keeps."""
    mapped = report.road_of("identity" if road == "compatible" else report.best)
    if mapped is None:
        raise ConfigError(f"{run.maps} has no map for these dimensions; add `affine` to maps")
    made = identity_map(*report.dimensions) if mapped.kind == "identity" else None
    made = made or load_map(join(folder, MAP_FOLDER))
    facts = {
        "model": fixed_reference(run.model, checked.index.storage, run.tracking_uri),
        "weights": checked.weights,
        "query_instruction": run.query_instruction,
        "share": mapped.share,
        "share_of": report.base,
        "judged": report.judged,
        "queries": report.num_queries,
    }
    saved = record_adapter(checked.index, checked.weights, made, facts)
    return (f"{road.capitalize():<10} {saved} ({made.kind}), recorded for {checked.index.table}",)
