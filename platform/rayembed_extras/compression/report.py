"""Report a compression: tables, a plot, MLflow entries, and a registered version of each
variant.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from rayembed.assets.cache import cache_folder
from rayembed.assets.storage import join, write_atomic
from rayembed.config.document import published_values
from rayembed.config.model import without_place
from rayembed.display.figures import COLOURS, INK, new_figure, png_of, set_title
from rayembed.display.tables import Cell, Table, console
from rayembed.pipeline.evaluate.variants import (
    MEGABYTE,
    Scored,
    choose,
    report_files,
    report_tables,
    variants_table,
)
from rayembed.pipeline.register.registration import find_candidate, put
from rayembed.registry.mlflow_run import allowed_key
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.registered_model import connect
from rayembed.registry.run_folder import flatten
from rayembed.registry.tracking import Tracker
from rayembed_extras.compression.compress import CompressedModel, CompressionResult
from rayembed_extras.compression.run_settings import CompressionRun


def tables(result: CompressionResult) -> list[Table]:
    """Build all tables: variants, their scores by task, and the compressed share of each part."""
    original = result.variants[0].made

    def figures(made: CompressedModel) -> dict[str, object]:
        share = "" if made.share is None else f"{made.share:.1%}"
        row = {"compressed": share, "MB on disk": Cell(made.bytes_on_disk / MEGABYTE, digits=1)}
        if made.measured is None or original.measured is None:
            return row
        speed = made.measured.documents_per_second
        return {
            **row,
            "MB in memory": Cell(made.measured.memory / MEGABYTE, digits=0),
            "documents/s": Cell(speed, digits=1),
            "times": Cell(speed / original.measured.documents_per_second, digits=2),
        }

    title = f"Variants of {without_place(original.reference)}"
    return [*report_tables(title, result.variants, figures), parts_table(result)]


def parts_table(result: CompressionResult) -> Table:
    """Tabulate, for each variant, the share of each part's weights that was compressed."""
    rows = []
    for one in result.variants[1:]:
        parts = one.made.by_part.items()
        rows.append(
            (one.label, {part: f"{some / all_:.0%}" for part, (all_, some) in parts if all_})
        )
    return variants_table("Compressed of each part", rows)


def score_by_bytes(result: CompressionResult) -> bytes | None:
    """Draw a PNG with a point for each variant, mean score against bytes on disk; None without
    scores.

    The line joins variants of which none smaller scores as high.
    """
    drawn = [(v.label, v.made.bytes_on_disk / MEGABYTE, v.mean) for v in result.variants]
    points = [(label, size, mean) for label, size, mean in drawn if mean is not None]
    if not points:
        return None
    figure, axes = new_figure(width=7.5, height=4.6)
    best: list[tuple[float, float]] = []
    for _, size, mean in sorted(points, key=lambda point: (point[1], -point[2])):
        if not best or mean > best[-1][1]:
            best.append((size, mean))
    axes.plot(*zip(*best, strict=True), color=COLOURS[0], linewidth=1.2, zorder=1)
    for number, (label, size, mean) in enumerate(points):
        colour, mark = COLOURS[number % len(COLOURS)], "osD^"[number // len(COLOURS) % 4]
        axes.scatter(size, mean, s=42, color=colour, marker=mark, zorder=3, label=label)
    axes.legend(fontsize=8, labelcolor=INK, frameon=False)
    axes.set_xlabel("megabytes on disk")
    axes.set_ylabel("mean score")
    set_title(axes, "Score against size")
    return png_of(figure)


def write_report(result: CompressionResult) -> str:
    """Write the report (settings, `variants.md`, `.csv` and `.png`); return its
    folder in storage.
    """
    run = result.run
    folder = join(run.placement.storage_path, "compressed", run.title)
    for name, data in _files(result).items():
        write_atomic(join(folder, name), data)
    return folder


def _files(result: CompressionResult) -> dict[str, bytes]:
    picture = score_by_bytes(result)
    return {
        "compression.yaml": result.run.published().encode(),
        **report_files("variants", tables(result)),
        **({} if picture is None else {"variants.png": picture}),
    }


def open_tracker(run: CompressionRun, tracking_uri: str) -> Tracker:
    """Open the MLflow run of a compression, or resume it; the caller must close it.

    Raises:
        TrackingError: MLflow is away or refuses.
        ArtifactError: MLflow has another run of that name.
    """
    published = published_values(run, run.placement.storage_path)
    return Tracker.open(
        tracking_uri,
        run.placement.experiment,
        run.title,
        run.fingerprint,
        flatten({name: published[name] for name in ("model", "ways", "calibration")}),
        {},
        folder=_kept(run),
        total_steps=1,
        storage=run.placement.storage_path,
    )


def _kept(run: CompressionRun) -> Path:
    """Return the local folder of log records that MLflow may not have received."""
    return cache_folder() / "compression-runs" / run.fingerprint


def track(result: CompressionResult, tracker: Tracker) -> dict[str, str]:
    """Log all variants to MLflow; return the version of each by its label, if they are registered.

    Raises:
        TrackingError: MLflow is away or refuses.
    """
    run = result.run
    tracker.log_provenance(collect_provenance({}))
    for variant in result.variants:
        tracker.log_scores(f"score/{variant.label}", variant.scores, 0)
        tracker.log_scores(f"size/{variant.label}", _figures(variant.made), 0)
    report = _kept(run) / "report"
    for name, data in _files(result).items():
        write_atomic(str(report / name), data)
    tracker.log_artifact(report, "report")
    if run.placement.registered_model is None:
        return {}
    return {v.label: _registered(result, v, tracker) for v in result.variants[1:]}


def _figures(made: CompressedModel) -> dict[str, float]:
    """Collect a variant's size, speed and compressed share, without its scores."""
    found = {"bytes_on_disk": float(made.bytes_on_disk)}
    if made.share is not None:
        found["compressed_share"] = made.share
    if made.measured is not None:
        found["bytes_in_memory"] = float(made.measured.memory)
        found["documents_per_second"] = made.measured.documents_per_second
    return found


def _registered(
    result: CompressionResult, variant: Scored[CompressedModel], tracker: Tracker
) -> str:
    """Register a variant in MLflow, with its scores, method and figures as tags.

    No alias is moved: `register_model --promote` with its gates does that.
    """
    name = result.run.placement.registered_model
    assert name is not None
    client = connect(tracker.tracking_uri)
    candidate = find_candidate(
        client,
        variant.made.reference,
        name,
        results=None if variant.result is None else str(variant.result.local),
        trusted=False,
        tracking_uri=tracker.tracking_uri,
    )
    made = put(client, candidate, name, lambda: nullcontext(tracker), may_be_candidate=False)
    tags = {
        "compression": variant.label,
        "compressed_from": without_place(result.run.model.reference),
    }
    tags |= {key: f"{value:.6g}" for key, value in _figures(variant.made).items()}
    for key, value in tags.items():
        client.set_model_version_tag(name, str(made.version), allowed_key(key), value)
    return made.uri


def print_report(
    result: CompressionResult,
    out: TextIO,
    *,
    folder: str,
    tracking_uri: str,
    versions: Mapping[str, str],
) -> None:
    """Print the tables, the addresses of all results, and the next command."""
    printer = console(out, soft_wrap=True)
    for table in tables(result):
        printer.print(table)
    for variant in result.variants[1:]:
        version_text = f"  {versions[variant.label]}" if variant.label in versions else ""
        printer.print(f"Variant    {variant.label}: {variant.made.reference}{version_text}")
    plot = ", variants.png" if result.run.any_tasks else ""
    printer.print(f"Report     {join(folder, 'variants.md')}, variants.csv{plot}")
    opened = "" if tracking_uri.startswith("http") else "mlflow ui --backend-store-uri "
    printer.print(f"MLflow     {opened}{shlex.quote(tracking_uri)}")
    best = shlex.quote(_best(result.variants[1:]).made.reference)
    printer.print(f"Next       rayembed serve --model {best}")


def _best(variants: Sequence[Scored[CompressedModel]]) -> Scored[CompressedModel]:
    """Choose the fastest variant (the smallest if speed is unknown) within 0.01 of the highest mean
    score; among all if none has a score.
    """

    def is_near(best: Scored[CompressedModel], other: Scored[CompressedModel]) -> bool:
        return (other.mean or 0.0) >= 0.99 * (best.mean or 0.0)

    def cost(variant: Scored[CompressedModel]) -> float:
        measured = variant.made.measured
        return variant.made.bytes_on_disk if measured is None else -measured.documents_per_second

    return choose(variants, lambda one: one.mean, near=is_near, cost=cost)
