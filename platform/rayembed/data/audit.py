"""Write an HTML page into each finished folder of records, for judging the data by eye: counts,
plots, examples.

All contents come from the manifest and the first part: a step shows a number, a table or examples
by putting them into its manifest.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import jinja2
import numpy as np

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.data.engine.artifacts import DatasetArtifact
from rayembed.data.engine.parts import read_records
from rayembed.data.records import Record
from rayembed.display.figures import new_figure, png_of

AUDIT = "audit.html"

_TITLES = {
    "judged_rows": "rows judged",
    "judged_negatives": "negatives judged",
    "false_negatives": "False negatives by reason",
    "unjudged": "Rows that were not judged and stay unchanged",
    "relabelled": "false negatives that became positives",
    "rows_added": "rows added, with such a positive",
    "dropped_negatives": "false negatives dropped",
    "negatives_per_row": "Negatives a row",
    "unusable_answers": "Unusable answers",
    "negatives_overlap": "negatives dropped that are or contain texts of benchmarks",
    "documents_overlap": "Documents of the corpus that are not mined",
    "removed": "Removed texts, and the texts that they match",
    "short": "rows with fewer negatives than asked for",
    "without_negatives": "rows without any negative",
    "mined": "negatives mined",
    "candidates": "candidates looked at",
    "refused": "Candidates refused (share of those looked at)",
    "positives_dropped": "positives dropped from rows that stay",
    "examples": "Rejected and dropped rows",
    "unread_columns": "Columns that no setting reads",
    "pair_rules": "Pairs by the rule that gave them, before duplicates are dropped",
    "masked_share": "share of in-batch negatives that are masked",
    "example_batches": "Batches to read",
}
_OF_ROWS = frozenset({"short", "without_negatives"})
"""Counts that are shown with their share of all rows."""

_EXAMPLES = 20
_SHOWN_CHARACTERS = 600

_SHOWN_OTHERWISE = frozenset(
    {
        *("fingerprint", "kind", "dataset", "inputs", "made_of", "seconds", "parts", "histograms"),
        *("digests", "repair_examples"),
        *("rows_in", "rejected", "records_made", "dropped", "rows_out", "mining_examples"),
    }
)


def write_folder_audit(prepared: DatasetArtifact) -> str:
    """Write the audit page of a folder, unless it exists; returns its path."""
    path = join(prepared.folder, AUDIT)
    if not exists(path):
        parts = prepared.parts
        records = read_records(parts[0].path) if parts else []
        plot = join(prepared.folder, "clusters.png")
        drawn = {"Clusters": _png(read_bytes(plot))} if exists(plot) else {}
        write_atomic(path, audit_page(prepared.manifest, records, drawn).encode())
    return path


def audit_page(
    manifest: Mapping[str, Any],
    records: Sequence[Record],
    pictures: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Render the audit page as self-contained HTML, with texts from the data escaped.

    Args:
        records: of which some evenly spaced ones are shown, and all counted for lengths.
        pictures: title → PNG in base64.
    """
    template = jinja2.Template(
        files("rayembed.data").joinpath(AUDIT).read_text(encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    places = np.linspace(0, len(records) - 1, min(_EXAMPLES, len(records))).astype(int)
    more = {key: value for key, value in manifest.items() if key not in _SHOWN_OTHERWISE}
    page: str = template.render(
        title=f"{manifest['dataset']}: {manifest['kind']}",
        manifest={"made_of": None, **manifest},
        pictures={**_pictures(manifest.get("histograms", [])), **pictures},
        tables=_tables(more, manifest["rows_out"]),
        mined=manifest.get("mining_examples", []),
        repaired=manifest.get("repair_examples", []),
        lists={_words(key): _shown_items(value) for key, value in more.items() if _items(value)},
        lengths=word_counts(records),
        shown_rows=len(records),
        records=[records[place] for place in places],
        inputs=json.dumps(manifest["inputs"], indent=1, ensure_ascii=False),
    )
    return page


def _tables(more: Mapping[str, Any], rows: int) -> dict[str, list[tuple[str, str]]]:
    """Make the page's tables: one of all single numbers, and one for each manifest entry that maps
    names to numbers.
    """
    single = [
        (_words(key), _number(value) + _share_of(value, rows if key in _OF_ROWS else 0))
        for key, value in more.items()
        if _is_single(value)
    ]
    tables = {"In numbers": single} if single else {}
    for key, value in more.items():
        shown = value.items() if isinstance(value, Mapping) else ()
        of = more.get("candidates", 0) if key == "refused" else 0
        table = [
            (_words(str(name)), _number(item) + _share_of(item, of))
            for name, item in shown
            if _is_single(item)
        ]
        if table:
            tables[_words(key)] = table
    return tables


def _share_of(value: Any, total: int) -> str:
    return f" ({value / total:.1%})" if total else ""


def _png(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _pictures(histograms: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Plot the histograms of each teacher's scores, given counts in equal bins over [-1,
    1].

    Values are PNG files in base64.
    """
    pictures = {}
    for number, found in enumerate(histograms, 1):
        drawn = {name: np.array(counts) for name, counts in found.items() if np.sum(counts)}
        if drawn:
            name = "Scores" if len(histograms) == 1 else f"Scores of teacher {number}"
            pictures[name] = _histogram(drawn)
    return pictures


def _histogram(drawn: Mapping[str, np.ndarray]) -> str:
    figure, axes = new_figure(width=9.0, height=3.2)
    for name, counts in drawn.items():
        edges = np.linspace(-1, 1, len(counts) + 1)
        label = f"{_words(name)} ({counts.sum():,})"
        # Shares: some of the rule's refusals are a hundred times as many as the positives.
        axes.stairs(counts / counts.sum(), edges, fill=True, alpha=0.45, label=label)
    seen = np.flatnonzero(sum(drawn.values()))
    bins = len(next(iter(drawn.values())))
    axes.set_xlim(-1 + 2 * seen[0] / bins - 0.02, -1 + 2 * (seen[-1] + 1) / bins + 0.02)
    axes.set_xlabel("score")
    axes.set_ylabel("share of its texts")
    axes.legend(frameon=False)
    return _png(png_of(figure, dpi=110))


def word_counts(records: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """Median, 95th percentile and maximum number of words in the queries, positives and
    negatives.
    """
    words = {
        "query": [len(r.query.split()) for r in records],
        "positive": [len(r.positives[0].split()) for r in records],
        "negative": [len(n.text.split()) for r in records for n in r.negatives],
    }
    rows = []
    for role, counts in words.items():
        if counts:
            middle, high = np.percentile(counts, [50, 95])
            rows.append((role, f"{middle:.0f}", f"{high:.0f}", f"{max(counts):,}"))
    return rows


def _items(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _shown_items(value: list[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [{key: _text(item) for key, item in found.items()} for found in value[:_EXAMPLES]]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _is_single(value: Any) -> bool:
    return isinstance(value, int | float | str | bool)


def _number(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else _text(value)


def _words(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " "))
