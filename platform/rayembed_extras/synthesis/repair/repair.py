"""Repair a data set: a judge detects false negatives among hard negatives, which are relabelled or
dropped.

An epoch trains one positive of a row, the first one first. So a relabelled negative becomes a
further positive of its row, which keeps it from being a negative anywhere in the batch, and the
first positive of a further row, which teaches it in the same epoch (RLHN, arXiv 2505.16967; its
three ways are the actions).
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayembed.config.data import DatasetConfig
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import PartItem, read_records, write_part
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.mining.counts import rows_to_show, shown_examples, write_examples
from rayembed.data.plan.teacher_scores import scores_of_positives
from rayembed.data.records import Record
from rayembed.data.words import normalised_hash
from rayembed.errors import DataError
from rayembed.models.versions import VECTORS
from rayembed_extras.synthesis.repair.settings import Action, RepairConfig
from rayembed_extras.synthesis.repair.verdicts import Decide, JudgeVerdict, JudgeWork

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Code version of the step; raise it when the same inputs yield other records or a
prompt changes."""

FALSE_NEGATIVE = "has a false negative"

_COUNTS = (
    *("judged_rows", "judged_negatives", "rows_with_false_negatives", "relabelled"),
    *("rows_added", "dropped_negatives", "without_negatives"),
)
"""Names of the counts in the manifest."""

_UNUSABLE_SHOWN = 3
_SHOWN_CHARACTERS = 300


def make_repaired(
    context: PipelineContext, dataset: DatasetConfig, parent: DatasetArtifact
) -> DatasetArtifact:
    """Repair the hard negatives of a data set; return the folder of repaired records.

    The manifest has, beside what all steps write: the `judge`, the `action`, `judged_rows`,
    `judged_negatives`, `rows_with_false_negatives`, `false_negatives` by reason, `unjudged` rows by
    reason, what the action made of them (`relabelled`, `rows_added`, `dropped_negatives`),
    `negatives_per_row` before and after, `without_negatives`, `repair_examples`.

    Raises:
        AssetError: the judge cannot be had, or does not answer any more.
        DataError: too many rows could not be judged, or no row is left.
    """
    config = _config(dataset)
    inputs = {
        "code": CODE_VERSION,
        "action": config.action,
        "judge": config.judge.inputs(context.teacher_loader.fingerprint),
        "records": parent.fingerprint,
        "seed": context.seed,
    }
    if config.judge.models:
        inputs["vectors"] = VECTORS
    writer = ArtifactWriter(context.storage, "repaired", dataset.name, inputs, parent)
    return writer.get_or_make(lambda: _repair(context, dataset, parent, writer))


def _repair(
    context: PipelineContext,
    dataset: DatasetConfig,
    parent: DatasetArtifact,
    writer: ArtifactWriter,
) -> DatasetArtifact:
    config = _config(dataset)
    decide = config.judge.ready(JudgeWork(context, writer, dataset.name, tuple(parent.parts)))
    working = writer.working_folder
    task = RepairPart(writer.parts_folder, working, config.action, decide)
    items = [PartItem(part) for part in parent.parts]
    what = f"repair {dataset.name}"
    # Results are kept next to their examples and removed with them.
    results = run_resumable(working, what, task, items, context.execute, config.judge.needs)
    parts = [part for result in results for part in result["parts"]]
    summary = _summary(results, config.action)
    if not parts:
        raise DataError(
            f"data set {dataset.name!r}: the repair removes all of its {summary['judged_rows']} "
            f"rows; set data.datasets.{dataset.name}.repair.action=relabel or drop, or check that "
            "the judge suits the data"
        )
    made = writer.finish(
        results,
        parts,
        {FALSE_NEGATIVE: sum(result["rows_dropped"] for result in results)},
        judge=f"{config.judge.kind}: {config.judge.summary}",
        **summary,
        repair_examples=shown_examples(results, working),
    )
    _log_outcome(dataset.name, made)
    return made


def _config(dataset: DatasetConfig) -> RepairConfig:
    """Return the data set's repair settings, a field that only exists when this package is
    installed.
    """
    config = getattr(dataset, RepairConfig.kind)
    assert isinstance(config, RepairConfig)
    return config


def _summary(results: Sequence[Result], action: Action) -> dict[str, Any]:
    """Sum the counts over all data files, for the manifest."""
    total: Counter[str] = Counter()
    false: Counter[str] = Counter()
    unjudged: Counter[str] = Counter()
    for result in results:
        total.update(result["counts"])
        false.update(result["false"])
        unjudged.update(result["unjudged"])
    rows_in = sum(result["rows_in"] for result in results)
    unusable = [one for result in results for one in result.get("examples", [])]
    return {
        "action": action,
        **{name: total[name] for name in _COUNTS},
        "false_negatives": dict(sorted(false.items())),
        "unjudged": dict(sorted(unjudged.items())),
        "negatives_per_row": {
            "before": round(total["before"] / max(rows_in, 1), 3),
            "after": round(total["after"] / max(total["rows_out"], 1), 3),
        },
        "examples": [],  # no row is rejected
        **({"unusable_answers": unusable[:_UNUSABLE_SHOWN]} if unusable else {}),
    }


def _log_outcome(name: str, made: DatasetArtifact) -> None:
    """Log the result, and warn if few negatives are left."""
    summary = made.manifest
    false, judged = sum(summary["false_negatives"].values()), summary["judged_negatives"]
    per_row = summary["negatives_per_row"]
    log.info(
        "repair of data set %s: %s of %s negatives are false negatives, in %s of %s rows "
        "(action: %s); negatives per row %.2f → %.2f",
        name,
        *(f"{count:,}" for count in (false, judged)),
        *(f"{summary[count]:,}" for count in ("rows_with_false_negatives", "judged_rows")),
        summary["action"],
        *(per_row["before"], per_row["after"]),
    )
    if 2 * false > judged:
        log.warning(
            "repair of data set %s: the judge rates more than half of the negatives as "
            "positives; check the examples on the audit page, and change "
            "data.datasets.%s.repair.judge",
            *(name, name),
        )


@dataclass(frozen=True)
class RepairPart:
    """Task that writes the repaired records of a data file."""

    folder: str
    """Folder of the output parts."""
    examples: str
    """Folder of each part's examples, read by `counts.shown_examples`."""
    action: Action
    decide: Decide

    def __call__(self, item: PartItem, device: str = "cpu") -> Result:
        """Run the task; its result has the new data file, counts and examples."""
        records = read_records(item.part.path)
        verdicts = self.decide(item.part, records, device)
        pairs = list(zip(records, verdicts, strict=True))
        made = [repaired(record, verdict, self.action) for record, verdict in pairs]
        done = [record for several in made for record in several]
        part = write_part(self.folder, done) if done else None
        rows_dropped = sum(not several for several in made)
        shown = {order: _example(*pairs[row], self.action) for order, row in _to_show(pairs)}
        write_examples(self.examples, item.part.digest, shown)
        return {
            "rows_in": len(records),
            "rows_used": len(records),
            "rows_out": len(done) + rows_dropped,
            "rejected": {},
            "parts": [] if part is None else [[part.name, part.rows]],
            "rows_dropped": rows_dropped,
            "counts": self._counts(pairs, made, done),
            "false": dict(Counter(v.reason for _, v in pairs for _ in v.false)),
            "unjudged": dict(Counter(v.problem for _, v in pairs if v.problem)),
            "examples": [
                {"reason": v.problem, "query": _shown(r.query), "answer": v.answer}
                for r, v in pairs
                if v.answer
            ][:_UNUSABLE_SHOWN],
            "part": item.part.digest,
            "examples_at": list(shown),
        }

    def _counts(
        self,
        pairs: Sequence[tuple[Record, JudgeVerdict]],
        made: Sequence[Sequence[Record]],
        done: Sequence[Record],
    ) -> dict[str, int]:
        judged = [record for record, verdict in pairs if not verdict.problem]
        false = sum(len(verdict.false) for _, verdict in pairs)
        return {
            "judged_rows": len(judged),
            "judged_negatives": sum(len(record.negatives) for record in judged),
            "rows_with_false_negatives": sum(bool(verdict.false) for _, verdict in pairs),
            "relabelled": false if self.action == "relabel" else 0,
            "rows_added": sum(len(several) - 1 for several in made if several),
            "dropped_negatives": false if self.action == "drop" else 0,
            "without_negatives": sum(not record.negatives for record in done),
            "before": sum(len(record.negatives) for record, _ in pairs),
            "after": sum(len(record.negatives) for record in done),
            "rows_out": len(done),
        }


def repaired(record: Record, verdict: JudgeVerdict, action: Action) -> list[Record]:
    """Apply the action to a judged record; return the resulting records, which may be none or
    several.

    The further rows of `relabel` share the query and the negatives that are left. Their teacher's
    score is that of the negative that they were; without one they have none, so that a loss that
    learns scores leaves them to InfoNCE.
    """
    if not verdict.false:
        return [record]
    if action == "drop_row":
        return []
    places = range(len(record.negatives))
    left = tuple(record.negatives[place] for place in places if place not in verdict.false)
    false = [(place, record.negatives[place]) for place in sorted(verdict.false)]
    if action == "drop":
        hashes = (normalised_hash(negative.text) for _, negative in false)
        known = tuple(dict.fromkeys((*record.false_negatives, *hashes)))
        return [replace(record, negatives=left, false_negatives=known)]
    texts = tuple(dict.fromkeys((*record.positives, *(one.text for _, one in false))))
    scores = _scores(record, "positive_score", {n.text: n.score for _, n in false})
    crossed = _scores(record, "positive_cross_score", {n.text: n.cross_score for _, n in false})

    def row(name: str, first: str) -> Record:
        order = (first, *(text for text in texts if text != first))
        of_order = scores_of_positives(
            [scores[text] for text in order], [crossed[text] for text in order]
        )
        return replace(record, id=name, positives=order, negatives=left, **of_order)

    further = [row(f"{record.id}#{place}", negative.text) for place, negative in false]
    return [row(record.id, record.positives[0]), *further]


def _scores(
    record: Record, name: str, of_false: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Text → score, for the record's positives and false negatives; None where no score is
    known.
    """
    known = getattr(record, f"{name}s") or (getattr(record, name),)
    own = dict.fromkeys(record.positives) | dict(zip(record.positives, known, strict=False))
    return {**of_false, **own}


def _to_show(pairs: Sequence[tuple[Record, JudgeVerdict]]) -> list[tuple[int, int]]:
    """Choose rows with false negatives as examples; return their sort keys and row indices."""
    rows = [row for row, (_, verdict) in enumerate(pairs) if verdict.false]
    return [(order, rows[n]) for order, n in rows_to_show([pairs[row][0] for row in rows])]


def _example(record: Record, verdict: JudgeVerdict, action: Action) -> dict[str, Any]:
    """Describe one row before and after the repair, for the audit page."""
    scores: list[float | None] = [round(score, 4) for score in verdict.scores]
    scores = scores or [None] * len(record.negatives)
    negatives = [
        {"text": _shown(one.text), "score": score}
        for one, score in zip(record.negatives, scores, strict=True)
    ]
    low = verdict.positive_score
    return {
        "query": _shown(record.query),
        "positives": [_shown(text) for text in record.positives],
        "positive_score": None if low is None else round(low, 4),
        "kept": [one for place, one in enumerate(negatives) if place not in verdict.false],
        "false": [one for place, one in enumerate(negatives) if place in verdict.false],
        "reason": verdict.reason,
        "action": action,
    }


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
