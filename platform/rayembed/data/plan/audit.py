"""A page beside the batch plan that shows what is trained: counts, lengths, examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayembed.assets.storage import exists, join, write_atomic
from rayembed.data.parts import Part, read_records
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.records import Record

_EXAMPLES = 3
_SHOWN_CHARACTERS = 240
_NEGATIVES_SHOWN = 2


def write_audit(
    plan: BatchPlan, manifests: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Sequence[Part]]
) -> str:
    """Path of `audit.md` in the plan's folder; written where it is not there yet.

    Args:
        manifests: of each data set's records.
        parts: of each data set; lengths and examples are those of the first part.
    """
    path = join(plan.folder, "audit.md")
    if not exists(path):
        sections = [_head(plan)]
        for name in sorted(parts):
            records = read_records(parts[name][0].path)
            sections.append(audit_dataset(name, plan.manifest, manifests[name], records))
        write_atomic(path, "\n".join(sections).encode())
    return path


def audit_dataset(
    name: str,
    plan: Mapping[str, Any],
    manifest: Mapping[str, Any],
    records: Sequence[Record],
) -> str:
    """The Markdown section of one data set."""
    drawn = plan["datasets"][name]
    rejected = {**manifest["rejected"], **manifest["dropped"], **drawn["rejected"]}
    words = {
        "query": [len(r.query.split()) for r in records],
        "positive": [len(r.positives[0].split()) for r in records],
        "negative": [len(n.text.split()) for r in records for n in r.negatives],
    }
    negatives = np.array([len(r.negatives) for r in records])
    lines = [
        f"## {name}",
        "",
        f"- rows: {drawn['rows']:,} usable of {manifest['rows_in']:,}; {drawn['drawn']:,} drawn, "
        f"{drawn['epochs']} epochs",
        f"- rejected: {', '.join(f'{c:,} × {r}' for r, c in rejected.items()) or 'none'}",
        f"- with negatives: {(negatives > 0).mean():.1%} of rows, {negatives.mean():.2f} a row",
        f"- in-batch negatives: {np.mean([r.in_batch for r in records]):.0%} of rows",
        f"- task: {records[0].task}; query instruction: {records[0].query_instruction!r}; "
        f"document instruction: {records[0].document_instruction!r}",
        "",
        "| words | median | 95 % | longest |",
        "|---|---|---|---|",
    ]
    for role, counts in words.items():
        if counts:
            middle, high = np.percentile(counts, [50, 95])
            lines.append(f"| {role} | {middle:.0f} | {high:.0f} | {max(counts)} |")
    places = np.linspace(0, len(records) - 1, min(_EXAMPLES, len(records))).astype(int)
    for number, place in enumerate(places, 1):
        lines += ["", *_example(number, records[place])]
    return "\n".join([*lines, ""])


def _head(plan: BatchPlan) -> str:
    values = plan.manifest
    return "\n".join(
        [
            f"# Batch plan {values['fingerprint']}, stage {values['key']}",
            "",
            f"{values['num_steps']:,} steps of {values['global_pairs']:,} pairs with up to "
            f"{values['num_negatives']} hard negatives; in-batch negatives "
            f"{'on' if values['in_batch_negatives'] else 'off'}; policy {values['policy']}, seed "
            f"{values['seed']}, weights {values['weights']}.",
            "",
        ]
    )


def _example(number: int, record: Record) -> list[str]:
    label = f" ({record.label})" if record.label else ""
    score = "" if record.positive_score is None else f" [{record.positive_score:.3f}]"
    lines = [
        f"{number}. query{label}: {_shown(record.query)}",
        f"   - positive{score}: {_shown(record.positives[0])}",
    ]
    for negative in record.negatives[:_NEGATIVES_SHOWN]:
        origin = "" if negative.score is None else f" {negative.score:.3f}, rank {negative.rank}"
        lines.append(f"   - negative [{negative.rule}{origin}]: {_shown(negative.text)}")
    return lines


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
