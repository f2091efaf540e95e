"""Report of what a store returns: a table, its CSV and a plot."""

from typing import TextIO

from rayembed.assets.storage import join, write_atomic
from rayembed.display.figures import COLOURS, INK, new_figure, png_of, set_title
from rayembed.display.tables import Cell, Table, best_of, console
from rayembed.pipeline.evaluate.variants import report_files
from rayembed_extras.indexing.manifest import folder_of
from rayembed_extras.indexing.store_scores import ScoresReport, StoreScores

_MARKS = ("o", "s", "D", "^", "v", "P")
"""Marker of each index, so that a print without colours can be read."""


def scores_table(report: ScoresReport) -> Table:
    """Tabulate all measurements, one way to store and search a row."""
    k, digits = report.k, 3
    heads = ["number type", "index", "search", f"recall@{k}", f"recall@{k} of the table's vectors"]
    heads += [f"nDCG@{k}", f"recall@{k} judged"] if report.judged else []
    heads += ["ms a query", "ms, 95 %", "bytes a row", "build s"]
    best = {
        name: best_of([getattr(row, name) for row in report.scores], digits)
        for name in ("ndcg", "judged_recall")
    }

    def marked(row: StoreScores, name: str) -> Cell:
        value = getattr(row, name)
        return Cell(value, best=value is not None and round(value, digits) == best[name])

    rows = []
    for row in report.scores:
        cells: list[object] = [row.number_type, row.index, row.search or "default"]
        if row.milliseconds is None:
            cells[2] = ""
        cells += [Cell(row.recall), Cell(row.recall_of_table)]
        cells += [marked(row, "ndcg"), marked(row, "judged_recall")] if report.judged else []
        cells += [
            Cell(row.milliseconds, digits=2),
            Cell(row.slow_milliseconds, digits=2),
            Cell(row.bytes_a_row, digits=0),
            Cell(row.build_seconds, digits=1),
        ]
        rows.append(cells)
    of = "judged queries" if report.judged else "of its rows as queries"
    title = f"{report.name} in {report.kind}: {report.rows:,} rows, {report.queries:,} {of}"
    return Table(heads, rows, title=title, align="lllr")


def scores_plot(report: ScoresReport) -> bytes | None:
    """Draw a PNG with a point for each way to search: the score against the time of a query.

    The score is nDCG with judged queries, else recall of the table's vectors; dotted lines are
    exact search. None without searches.
    """
    searched = [row for row in report.scores if row.milliseconds is not None]
    if not searched:
        return None
    figure, axes = new_figure(width=7.5, height=4.6)
    types = list(dict.fromkeys(row.number_type for row in report.scores))
    indexes = list(dict.fromkeys(row.index for row in searched))

    def score(row: StoreScores) -> float:
        return row.recall_of_table if row.ndcg is None else row.ndcg

    for row in report.scores:
        colour = COLOURS[(2 + types.index(row.number_type)) % len(COLOURS)]
        if row.milliseconds is None:
            axes.axhline(score(row), color=colour, linewidth=1, linestyle=":", zorder=1)
    for number_type in types:
        for index in indexes:
            rows = [r for r in searched if (r.number_type, r.index) == (number_type, index)]
            rows.sort(key=lambda r: r.milliseconds or 0.0)
            if not rows:
                continue
            colour = COLOURS[(2 + types.index(number_type)) % len(COLOURS)]
            axes.plot(
                [row.milliseconds for row in rows],
                [score(row) for row in rows],
                color=colour,
                marker=_MARKS[indexes.index(index) % len(_MARKS)],
                markersize=6,
                linewidth=1,
                label=f"{number_type}, {index}",
                zorder=3,
            )
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a query")
    name = f"nDCG@{report.k}" if report.judged else f"recall@{report.k}"
    axes.set_ylabel(name)
    axes.legend(fontsize=8, labelcolor=INK, frameon=False)
    set_title(axes, f"{report.name} in {report.kind}: {name}; dotted: exact search")
    return png_of(figure)


def write_report(storage: str, report: ScoresReport) -> str:
    """Write `store_scores.md`, `.csv` and `.png`; return their folder in storage."""
    folder = join(folder_of(storage, report.name), "scores")
    files = report_files("store_scores", [scores_table(report)])
    picture = scores_plot(report)
    for name, data in {**files, **({"store_scores.png": picture} if picture else {})}.items():
        write_atomic(join(folder, name), data)
    return folder


def print_report(storage: str, report: ScoresReport, out: TextIO) -> None:
    """Write the report's files, and print the table and where they are."""
    folder = write_report(storage, report)
    console(out).print(scores_table(report))
    out.write(f"Report     {join(folder, 'store_scores.md')}, store_scores.csv, store_scores.png\n")
