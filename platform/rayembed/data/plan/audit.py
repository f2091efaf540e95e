"""Audit of a batch plan: counts and examples of its rows, and the processing steps that each row
comes from.

Lineage traces a batch back to source rows, with the processing steps in between. A plan names the
folder that each data set's rows came from, and each folder names its parent, up to the converted
records; see `prepare` for their locations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayembed.assets.storage import exists, join, write_atomic
from rayembed.assets.store import MANIFEST
from rayembed.config.data_steps import step_folders
from rayembed.config.sources import SOURCES
from rayembed.data.audit import AUDIT, word_counts
from rayembed.data.engine.artifacts import DatasetArtifact, open_artifact, root_of
from rayembed.data.engine.parts import Part, read_records
from rayembed.data.epochs import many_passes
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.records import Record
from rayembed.data.sources.tasks import NOT_BAD, counts_of
from rayembed.data.sources.unread import unread_warning
from rayembed.display.tables import Table, show
from rayembed.errors import ArtifactError

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
    """Write the page `audit.md` about a plan into its folder, unless it exists; returns its
    path.

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


def plan_warnings(plan: BatchPlan) -> list[str]:
    """Warn where the plan's rows lack what the stage's settings request: hard negatives, teacher
    scores, or enough rows and steps.
    """
    found, stage = [], f"stage {plan.manifest['key']}"
    drawn = plan.manifest["datasets"].items()
    if told := "; ".join(
        f"{name} {of['negatives']['none']:,} without any and {of['negatives']['fewer']:,} with "
        f"fewer of {of['rows']:,} rows"
        for name, of in drawn
        if "negatives" in of and (of["negatives"]["none"] or of["negatives"]["fewer"])
    ):
        found.append(
            f"{stage} asks for {plan.num_negatives} hard negatives of each query and not all rows "
            f"have them: {told}"
        )
    if told := "; ".join(
        f"{name} {of['scores']['unscored']:,} without any of {of['drawn']:,} drawn"
        for name, of in drawn
        if "scores" in of and of["scores"]["unscored"]
    ):
        found.append(
            f"{stage} learns from a teacher's scores of hard negatives and not all rows have them: "
            f"{told} (data.datasets.NAME.mining scores negatives, with pool=given those that rows "
            "bring)"
        )
    if told := "; ".join(
        f"{name} {of['positives']['trained']:,} of {of['positives']['all']:,}"
        for name, of in drawn
        if "positives" in of and of["positives"]["trained"] < of["positives"]["all"]
    ):
        found.append(
            f"{stage} trains some of the positives of its rows: {told}. A row trains "
            f"{plan.manifest.get('num_positives', 1)} of them each time it is drawn, beginning "
            "with the next one the next time: more steps or epochs train the others, or "
            "batch.num_positives more at once"
        )
    if plan.manifest.get("epochs") is None:
        rows = sum(of["rows"] for _, of in drawn)
        passes = plan.num_steps * plan.global_pairs / rows
        length = f"{plan.num_steps:,} steps"
        found += many_passes(plan.manifest["key"], length, rows, passes)
    return found


def audit_dataset(
    name: str,
    plan: Mapping[str, Any],
    manifest: Mapping[str, Any],
    records: Sequence[Record],
) -> str:
    """Write the audit's Markdown section about one data set."""
    drawn = plan["datasets"][name]
    rejected = {**manifest["rejected"], **manifest["dropped"], **drawn["rejected"]}
    lengths = Table(["words", "median", "95 %", "longest"], word_counts(records))
    negatives = np.array([len(r.negatives) for r in records])
    lines = [
        f"## {name}",
        "",
        f"- rows: {drawn['rows']:,} usable of {manifest['rows_in']:,}; {drawn['drawn']:,} drawn, "
        f"{drawn['epochs']} epochs",
        *_drawn(plan, drawn),
        f"- rejected: {', '.join(f'{c:,} × {r}' for r, c in rejected.items()) or 'none'}",
        f"- with negatives: {(negatives > 0).mean():.1%} of rows, {negatives.mean():.2f} a row",
        *_counted(plan, drawn, manifest),
        f"- in-batch negatives: {np.mean([r.in_batch for r in records]):.0%} of rows",
        f"- task: {records[0].task}; query instruction: {records[0].query_instruction!r}; "
        f"document instruction: {records[0].document_instruction!r}",
        "",
        show(lengths, "markdown").rstrip(),
    ]
    places = np.linspace(0, len(records) - 1, min(_EXAMPLES, len(records))).astype(int)
    for number, place in enumerate(places, 1):
        lines += ["", *_example(number, records[place])]
    return "\n".join([*lines, ""])


def _counted(
    plan: Mapping[str, Any], drawn: Mapping[str, Any], manifest: Mapping[str, Any]
) -> list[str]:
    """List the counts of hard negatives, teacher scores and masked false negatives, as far as the
    plan uses them.
    """
    lines = []
    if "negatives" in drawn:
        counts = drawn["negatives"]
        lines.append(
            f"- hard negatives: {plan['num_negatives']} of each query are asked for; "
            f"{counts['enough']:,} rows have them, {counts['fewer']:,} fewer, {counts['none']:,} "
            "none"
        )
    if "scores" in drawn:
        scored = drawn["scores"]["scored"]
        lines.append(f"- a teacher's scores: {scored:,} of {drawn['drawn']:,} drawn rows have them")
    if "masked_share" in manifest:
        similar, mean = manifest["similarity"], manifest["sizes"]["mean"]
        lines.append(
            f"- clusters: {manifest['clusters']:,} of mean size {mean:.0f}; similarity within a "
            f"batch {similar['mean']:.3f}, in random batches {similar['random_mean']:.3f}; "
            f"{manifest['masked_share']:.2%} of in-batch negatives masked"
        )
    return lines


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


def _drawn(plan: Mapping[str, Any], drawn: Mapping[str, Any]) -> list[str]:
    """List the steps that draw from the data set, also by language, and how many of the drawn rows'
    positives are trained, as far as the plan records them.
    """
    lines = [f"- steps: {drawn['steps']:,} of {plan['num_steps']:,}"] if "steps" in drawn else []
    languages = drawn.get("languages", [])
    if len(languages) > 1 or any(of["language"] for of in languages):
        told = (
            f"{of['language'] or 'none'} {of['steps']:,} ({of['rows']:,} rows)"
            for of in sorted(languages, key=lambda of: (-of["rows"], str(of["language"])))
        )
        lines.append(f"- steps by language: {', '.join(told)}")
    if "positives" in drawn:
        counts = drawn["positives"]
        lines.append(
            f"- positives: the rows that are drawn have {counts['all']:,}, of which "
            f"{counts['trained']:,} are trained: one each time a row is drawn, in turn"
        )
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


_TOLD = (
    *("kind", "fingerprint", "inputs"),
    *("rows_in", "rejected", "records_made", "dropped", "rows_out"),
)


def lineage(plan: BatchPlan, step: int) -> list[tuple[Record, tuple[DatasetArtifact, ...]]]:
    """Return each row of a global batch with the folders of its data set, from the folder that the
    plan reads back to the folder of the converted records.

    A record tells the source rows that it was made from (`origin`), and of its negatives, which the
    plan kept, rank, score, rule and teacher; the folders' manifests have settings, teachers, counts
    and rejections.

    Raises:
        DataError: no such step.
        ArtifactError: the plan was made of other parts than those of `prepare`, or a folder that it
            was made of is not there any more.
    """
    records, chains = plan.read(step), folders_of(plan)
    return [(record, chains[record.dataset]) for record in records]


def folders_of(plan: BatchPlan) -> dict[str, tuple[DatasetArtifact, ...]]:
    """Map each data set to its folders, from the folder that the plan reads back to the folder of
    the converted records.

    Raises:
        ArtifactError: as `lineage`.
    """
    inputs = dict(plan.manifest["inputs"])
    missing = sorted(set(plan.manifest["datasets"]) - set(inputs))
    if missing:
        raise ArtifactError(
            f"the batch plan {plan.folder!r} does not record the folders of its data set "
            f"{missing[0]!r}; only batch plans that `prepare` wrote record them"
        )
    storage = root_of(plan.folder)
    return {name: _chain(storage, name, str(found)) for name, found in inputs.items()}


def _chain(storage: str, dataset: str, fingerprint: str) -> tuple[DatasetArtifact, ...]:
    found: list[DatasetArtifact] = []
    wanted: str | None = fingerprint
    while wanted is not None:
        kinds = (*reversed(step_folders()), "synthetic")
        folders = [join(storage, "data", kind, f"{dataset}-{wanted}") for kind in kinds]
        folder = next((f for f in folders if exists(join(f, MANIFEST))), None)
        if folder is None:
            raise ArtifactError(
                f"there is no folder of the records {dataset}-{wanted} below "
                f"{join(storage, 'data')!r}; it was removed, or the plan was copied without it"
            )
        found.append(open_artifact(folder))
        wanted = found[-1].manifest["inputs"].get("records")
    return tuple(found)


def data_warnings(plan_folder: str) -> list[str]:
    """Repeat the warnings that preparation logged at its end, about missing data and about columns
    that no setting reads.

    Raises:
        ArtifactError: as `lineage`.
    """
    plan = BatchPlan.open(plan_folder)
    lines = [unread_warning(chain[-1].manifest) for chain in folders_of(plan).values()]
    return [*(line for line in lines if line is not None), *plan_warnings(plan)]


def rejected_rows(plan_folder: str) -> list[str]:
    """Describe the rejected rows of each data set in one line: share, reasons, and the page with
    examples. Rows that are held out, or that a source rejects by its rule, are none of them.

    Raises:
        ArtifactError: as `lineage`.
    """
    lines = []
    for name, chain in folders_of(BatchPlan.open(plan_folder)).items():
        manifest = chain[-1].manifest
        kind = SOURCES.classes().get(manifest["inputs"]["settings"]["source"]["kind"])
        tolerated = NOT_BAD | getattr(kind, "tolerated", frozenset())
        bad = {why: count for why, count in manifest["rejected"].items() if why not in tolerated}
        if number := sum(bad.values()):
            lines.append(
                f"{name}: {number:,} of {manifest['rows_in']:,} rows "
                f"({number / manifest['rows_in']:.1%}): {counts_of(bad)}; examples: "
                f"{join(chain[-1].folder, AUDIT)}"
            )
    return lines


def teacher_provenance(plan_folder: str) -> list[dict[str, Any]]:
    """Describe the teachers whose vectors the stage reads, in order, as plain values that remain
    when their folders are deleted.

    Raises:
        ArtifactError: a folder of vectors is gone or broken.
    """
    names = ("teacher", "dtype", "width", "texts", "inputs")
    found = [open_artifact(folder) for folder in BatchPlan.open(plan_folder).teachers]
    return [{"folder": one.folder, **{name: one.manifest[name] for name in names}} for one in found]


def data_provenance(plan_folder: str) -> dict[str, list[dict[str, Any]]]:
    """Map each data set to its folders in order, with the inputs and row counts of their
    manifests.

    Stored with a model's run: plain values that remain when the folders are deleted.

    Raises:
        ArtifactError: as `lineage`.
    """
    return {
        name: [
            {"folder": one.folder, **{key: one.manifest[key] for key in _TOLD}}
            for one in reversed(chain)
        ]
        for name, chain in folders_of(BatchPlan.open(plan_folder)).items()
    }
