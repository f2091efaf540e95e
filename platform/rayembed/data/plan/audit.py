"""Audit page of a batch plan: counts, lengths and examples of what is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayembed.assets.storage import exists, join, write_atomic
from rayembed.data.parts import Part, read_records
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.records import Record
from rayembed.tables import Table, show

_EXAMPLES = 3
_SHOWN_CHARACTERS = 240
_NEGATIVES_SHOWN = 2

_POLICIES = {
    "blended": "every batch draws from all data sets",
    "homogeneous": "every batch is of one data set and one language",
    "clustered": "every batch is one of similar pairs of one data set",
}


def write_audit(
    plan: BatchPlan, manifests: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Sequence[Part]]
) -> str:
    """Write `audit.md` into the plan's folder, unless it exists; returns its path.

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


def negatives_warning(plan: BatchPlan) -> str | None:
    """One warning line about rows with fewer hard negatives than requested; None if all have
    enough.
    """
    told = []
    for name, drawn in plan.manifest["datasets"].items():
        counts = drawn.get("negatives", {"none": 0, "fewer": 0})
        if counts["none"] or counts["fewer"]:
            told.append(
                f"{name} {counts['none']:,} without any and {counts['fewer']:,} with fewer of "
                f"{drawn['rows']:,} rows"
            )
    if not told:
        return None
    return (
        f"stage {plan.manifest['key']} asks for {plan.num_negatives} hard negatives of each query "
        f"and not all rows have them: {'; '.join(told)}"
    )


def audit_dataset(
    name: str,
    plan: Mapping[str, Any],
    manifest: Mapping[str, Any],
    records: Sequence[Record],
) -> str:
    """Markdown section of one data set."""
    drawn = plan["datasets"][name]
    rejected = {**manifest["rejected"], **manifest["dropped"], **drawn["rejected"]}
    words = {
        "query": [len(r.query.split()) for r in records],
        "positive": [len(r.positives[0].split()) for r in records],
        "negative": [len(n.text.split()) for r in records for n in r.negatives],
    }
    lengths = [
        [role, *(f"{value:.0f}" for value in np.percentile(counts, [50, 95])), max(counts)]
        for role, counts in words.items()
        if counts
    ]
    negatives = np.array([len(r.negatives) for r in records])
    lines = [
        f"## {name}",
        "",
        f"- rows: {drawn['rows']:,} usable of {manifest['rows_in']:,}; {drawn['drawn']:,} drawn, "
        f"{drawn['epochs']} epochs",
        *_steps(plan, drawn),
        f"- rejected: {', '.join(f'{c:,} × {r}' for r, c in rejected.items()) or 'none'}",
        f"- with negatives: {(negatives > 0).mean():.1%} of rows, {negatives.mean():.2f} a row",
        *_negatives(plan, drawn),
        *_false_negatives(manifest),
        f"- in-batch negatives: {np.mean([r.in_batch for r in records]):.0%} of rows",
        f"- task: {records[0].task}; query instruction: {records[0].query_instruction!r}; "
        f"document instruction: {records[0].document_instruction!r}",
        "",
        show(Table(["words", "median", "95 %", "longest"], lengths), "markdown").rstrip(),
    ]
    places = np.linspace(0, len(records) - 1, min(_EXAMPLES, len(records))).astype(int)
    for number, place in enumerate(places, 1):
        lines += ["", *_example(number, records[place])]
    return "\n".join([*lines, ""])


def _negatives(plan: Mapping[str, Any], drawn: Mapping[str, Any]) -> list[str]:
    """Available hard negatives of all rows against the number that the stage requests."""
    if "negatives" not in drawn:
        return []
    counts = drawn["negatives"]
    return [
        f"- hard negatives: {plan['num_negatives']} of each query are asked for; "
        f"{counts['enough']:,} rows have them, {counts['fewer']:,} fewer, {counts['none']:,} none"
    ]


def _false_negatives(manifest: Mapping[str, Any]) -> list[str]:
    """False negatives that clustering masked, if the data set was clustered."""
    if "masked_share" not in manifest:
        return []
    similar = manifest["similarity"]
    return [
        f"- clusters: {manifest['clusters']:,} of mean size {manifest['sizes']['mean']:.0f}; "
        f"similarity within a batch {similar['mean']:.3f}, in random batches "
        f"{similar['random_mean']:.3f}; {manifest['masked_share']:.2%} of in-batch negatives masked"
    ]


def _head(plan: BatchPlan) -> str:
    values = plan.manifest
    return "\n".join(
        [
            f"# Batch plan {values['fingerprint']}, stage {values['key']}",
            "",
            f"{values['num_steps']:,} steps of {values['global_pairs']:,} pairs with up to "
            f"{values['num_negatives']} hard negatives; in-batch negatives "
            f"{'on' if values['in_batch_negatives'] else 'off'}; seed {values['seed']}.",
            "",
            f"Policy {values['policy']}: {_POLICIES[values['policy']]}. {_shares(values)}",
            "",
        ]
    )


def _shares(values: Mapping[str, Any]) -> str:
    weights = ", ".join(f"{name} {weight:g}" for name, weight in values["weights"].items())
    temperature = values["temperature"]
    if temperature is None:
        return f"Weights: {weights}."
    return f"Weights: {weights}; times rows to the power 1/{temperature:g}."


def _steps(plan: Mapping[str, Any], drawn: Mapping[str, Any]) -> list[str]:
    """Number of the stage's steps that draw from the data set, for policies with one data set a
    step.
    """
    if "steps" not in drawn:
        return []
    lines = [f"- steps: {drawn['steps']:,} of {plan['num_steps']:,}"]
    languages = drawn.get("languages", [])
    if len(languages) > 1 or any(of["language"] for of in languages):
        told = (
            f"{of['language'] or 'none'} {of['steps']:,} ({of['rows']:,} rows)"
            for of in sorted(languages, key=lambda of: (-of["rows"], str(of["language"])))
        )
        lines.append(f"- steps by language: {', '.join(told)}")
    return lines


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
