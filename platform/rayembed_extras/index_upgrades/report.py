"""Report of an upgrade's measurement: JSON, tables, CSV, an HTML page and a plot."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any, Literal

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.display.figures import COLOURS, INK, new_figure, png_of, set_title
from rayembed.display.tables import MISSING, Table, show
from rayembed_extras.index_upgrades.compare import FULL, Measurement
from rayembed_extras.index_upgrades.maps import MapKind
from rayembed_extras.index_upgrades.price import MeasuringCost, RoadPrice

REPORT_FILE = "upgrade.json"
CHOSEN = (
    "* the map that --road adapter takes, with the highest Agreement: the share of the new model's "
    "own first 10 documents that mapped queries find (of sentences that measure nothing else)"
)
"""Caption of the table of roads."""
MAP_FOLDER = "map"
"""Folder of the best map, beside the report."""


@dataclass(frozen=True)
class RoadRow:
    """Figures of a measured road."""

    label: str
    queries: str
    documents: str
    recall: float | None
    ndcg: float | None
    share: tuple[float, float, float] | None
    """Share of full re-embedding's recall@10, and its 95 % interval."""
    apart: tuple[float, float, float] | None
    """Difference of nDCG@10 to full re-embedding, and its 95 % interval."""
    kind: MapKind | None
    agreement: float | None
    seconds: float


@dataclass(frozen=True)
class UpgradeReport:
    """Stored result of a measurement; the recommendation follows from it and `keep`."""

    index: str
    table: str
    old: str
    new: str
    old_weights: str
    new_weights: str
    dimensions: tuple[int, int]
    """D_new and D_old."""
    roads: tuple[RoadRow, ...]
    best: MapKind | None
    judged: bool
    num_queries: int
    searched: int
    documents: int
    rows: int
    fit_rows: int
    notes: tuple[str, ...]
    prices: tuple[RoadPrice, ...]
    """Without money, which depends on the price per hour."""
    map_microseconds: float | None
    """Time to map a query's vector, alone."""
    measuring: MeasuringCost
    query_encoder: bool = False
    """Whether the new model embeds queries alone; shares are then of the old model's recall."""

    def road_of(self, kind: MapKind | None) -> RoadRow | None:
        """Road of a map, `identity` for none; None: it was not measured."""
        return next((row for row in self.roads if kind and row.kind == kind), None)

    @property
    def base(self) -> str:
        """Road that shares are of."""
        return "the index's own model" if self.query_encoder else FULL


def road_rows(measured: Measurement) -> tuple[RoadRow, ...]:
    """Reduce measured roads to their figures."""
    rows = []
    for road in measured.roads:
        scores, share, apart = road.scores, road.share, road.apart
        rows.append(
            RoadRow(
                road.label,
                road.queries,
                road.documents,
                None if scores is None else float(scores.recall.mean()),
                None if scores is None else float(scores.ndcg.mean()),
                None if share is None else (share.value, *share.interval),
                None if apart is None else (apart.mean, *(apart.interval or (0.0, 0.0))),
                road.kind,
                road.agreement,
                road.seconds,
            )
        )
    return tuple(rows)


def write_report(
    folder: str, report: UpgradeReport, sentence: str, prices: Sequence[RoadPrice]
) -> list[str]:
    """Write `upgrade.json`, `.csv`, `.html` and `.png`; return their addresses.

    Args:
        sentence: the recommendation.
        prices: of the roads, with money where it is known.

    Raises:
        StorageError: the folder cannot be written.
    """
    plot = roads_plot(report)
    contents = {
        "upgrade.csv": show(figures_table(report), "csv").encode(),
        "upgrade.png": plot,
        "upgrade.html": upgrade_page(report, sentence, prices, plot).encode(),
    }
    for name, content in contents.items():
        write_atomic(join(folder, name), content)
    write_json(join(folder, REPORT_FILE), asdict(report), indent=2)
    return [join(folder, name) for name in (*contents, REPORT_FILE)]


def read_report(folder: str) -> UpgradeReport | None:
    """Read a stored report; None: there is none.

    Raises:
        ArtifactError: it is damaged.
    """
    path = join(folder, REPORT_FILE)
    if not exists(path):
        return None
    values: dict[str, Any] = read_json(path, "Remove it, and the next upgrade measures again")
    values["roads"] = tuple(_road(row) for row in values["roads"])
    values["prices"] = tuple(RoadPrice(**price) for price in values["prices"])
    values["measuring"] = MeasuringCost(**values["measuring"])
    values["dimensions"], values["notes"] = tuple(values["dimensions"]), tuple(values["notes"])
    return UpgradeReport(**values)


def _road(row: Mapping[str, Any]) -> RoadRow:
    made = dict(row)
    for name in ("share", "apart"):
        made[name] = None if made[name] is None else tuple(made[name])
    return RoadRow(**made)


def roads_table(report: UpgradeReport) -> Table:
    """Table of all measured roads; the best map is marked."""
    recall = "Recall@10" if report.judged else "Overlap@10"
    heads = ["Road", "Queries", "Documents", recall, "nDCG@10", "Share kept (95 %)", "nDCG apart"]
    rows = [_cells(row, report.best) for row in report.roads]
    of = "judged queries" if report.judged else "first sentences of documents"
    whose = f"{report.base}'s" if report.query_encoder else "the new model's own"
    note = "" if report.judged else f"; right are {whose} first 10"
    title = (
        f"Upgrade of {report.index}: {report.num_queries:,} {of} over {report.searched:,} of "
        f"{report.documents:,} documents{note}"
    )
    caption = "" if report.best is None or report.query_encoder else CHOSEN
    heads = [*heads, "Agreement"]
    return Table(heads, rows, title=title, align="lllr", look="open", caption=caption)


def _cells(row: RoadRow, best: str | None) -> list[object]:
    chosen = " *" if best is not None and row.kind == best else ""
    share = apart = MISSING
    if row.share is not None:
        value, low, high = (100 * number for number in row.share)
        share = f"{value:.1f} % ({low:.1f} to {high:.1f})"
    if row.apart is not None:
        mean, low, high = row.apart
        apart = f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
    numbers = [MISSING if n is None else f"{n:.4f}" for n in (row.recall, row.ndcg)]
    agreement = MISSING if row.agreement is None else f"{row.agreement:.4f}"
    return [row.label + chosen, row.queries, row.documents, *numbers, share, apart, agreement]


def figures_table(report: UpgradeReport) -> Table:
    """Table of all figures in full, for files."""
    heads = ["road", "queries", "documents", "recall_at_10", "ndcg_at_10", "share", "share_low"]
    heads += ["share_high", "ndcg_difference", "difference_low", "difference_high", "agreement"]
    rows = []
    for row in report.roads:
        share, apart = row.share or ("",) * 3, row.apart or ("",) * 3
        figures = [row.recall, row.ndcg, *share, *apart, row.agreement, row.seconds]
        cells = ["" if figure is None else figure for figure in figures]
        rows.append(
            [
                row.label,
                row.queries,
                row.documents,
                *cells,
                row.kind is not None and row.kind == report.best,
            ]
        )
    return Table([*heads, "fit_seconds", "best"], rows)


def prices_table(prices: Sequence[RoadPrice]) -> Table:
    """Table of the roads' prices; an adapter's is that of the measurement, done already."""
    heads = ["Road", "Texts", "Tokens", "Hours of a process", "Stored bytes", "Price"]
    rows = [
        [
            price.road,
            f"{price.texts:,}",
            f"{price.tokens:,.0f}",
            f"{price.hours:,.3f}",
            f"{price.stored_bytes:,.0f}",
            MISSING if price.money is None else f"{price.money:,.2f}",
        ]
        for price in prices
    ]
    return Table(
        heads,
        rows,
        title="Price of each road",
        align="lr",
        look="open",
        caption="adapter (and compatible): this measurement, which is paid; backfill: all texts "
        "of the index, at the measured speed",
    )


def roads_plot(report: UpgradeReport) -> bytes:
    """Draw a PNG of each road's share of full re-embedding's recall, with its interval."""
    rows = [row for row in report.roads if row.share is not None]
    figure, axes = new_figure(width=7.2, height=1.5 + 0.34 * len(rows))
    axes.grid(visible=False)
    axes.axvline(100.0, color=INK, linewidth=0.9)
    for place, row in enumerate(reversed(rows)):
        value, low, high = (100 * number for number in row.share or (0.0, 0.0, 0.0))
        colour = COLOURS[2] if row.kind == report.best and row.kind else COLOURS[0]
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot([value], [place], "o", color=colour, markersize=6)
        axes.annotate(f"{value:.1f}", (high, place), (6, -3), textcoords="offset points", size=8)
    axes.set_yticks(range(len(rows)), [row.label for row in reversed(rows)])
    axes.margins(x=0.12, y=0.15)
    axes.set_xlabel(f"% of {report.base}'s recall@10")
    set_title(axes, f"Upgrade of {report.index}")
    return png_of(figure)


def upgrade_page(
    report: UpgradeReport, sentence: str, prices: Sequence[RoadPrice], plot: bytes
) -> str:
    """Render the report as a self-contained HTML page; texts are escaped."""
    import jinja2

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        files("rayembed_extras.index_upgrades").joinpath("page.html").read_text(encoding="utf-8")
    )
    tables = [roads_table(report), *([prices_table(prices)] if prices else [])]
    page: str = template.render(
        report=report,
        sentence=sentence,
        tables=[
            {"title": one.title, "heads": one.heads, "rows": one.rows, "caption": one.caption}
            for one in tables
        ],
        plot=base64.b64encode(plot).decode(),
    )
    return page


@dataclass(frozen=True)
class Recommendation:
    """The recommended road with its reason."""

    road: Literal["compatible", "adapter", "backfill"] | None
    """None: the index's own model stays, as a query encoder cannot embed its documents."""
    sentence: str


def recommend(report: UpgradeReport, keep: float) -> Recommendation:
    """Recommend the first of the roads `compatible` and `adapter` with the lower end of its
    interval at the stated share of full re-embedding's recall@10, else the backfill.
    """
    of = f"{report.base}'s {'recall@10' if report.judged else 'first 10 documents'}"
    backfill = next((price for price in report.prices if price.road == "backfill"), None)
    cost = later = ""
    if backfill is not None:
        cost = f" ({backfill.texts:,} texts, about {shown_hours(backfill.hours)} of one process)"
        later = f"; a backfill{cost} can wait"
    kept = "no map could be measured"
    for row in (report.road_of("identity"), report.road_of(report.best)):
        if row is None or row.share is None:
            continue
        value, low, high = (100 * number for number in row.share)
        as_they_are = row.kind == "identity"
        what = "new queries without a map keep" if as_they_are else f"the map {row.kind} keeps"
        kept = f"{what} {value:.1f} % ({low:.1f} to {high:.1f}) of {of}"
        if low >= 100 * keep:
            road: Literal["compatible", "adapter"] = "compatible" if as_they_are else "adapter"
            best, other = report.road_of(report.best), ""
            if best is not None and best.share is not None and best.share[0] > row.share[0]:
                other = f"; the map {best.kind} keeps {100 * best.share[0]:.1f} %"
            why = f"{kept}, and {100 * keep:g} % is enough{other}{later}."
            return Recommendation(road, f"{road.capitalize()}: {why}")
        kept += f", whose lower end is below {100 * keep:g} %"
    if report.query_encoder:
        return Recommendation(None, f"Stay with the index's own model: {kept}.")
    return Recommendation("backfill", f"Backfill{cost}: {kept}.")


def shown_hours(number: float) -> str:
    """Format hours: `12 s`, `3.4 minutes` or `5.6 hours`."""
    if number < 1 / 60:
        return f"{3600 * number:.0f} s"
    return f"{60 * number:.1f} minutes" if number < 1 else f"{number:,.1f} hours"
