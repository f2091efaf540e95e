"""Report clean scores: search the batch plan for test texts, and score the model without them."""

import csv
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np

from rayembed.assets.storage import exists, join, read_bytes, remove_folder
from rayembed.display.tables import MISSING, Cell, Table
from rayembed.evaluation.plan import Scoring
from rayembed.pipeline.evaluate.findings import ComparedModels, Finding, ScoredModels
from rayembed_extras.clean_scores.declared import declared_tasks
from rayembed_extras.clean_scores.overlap import (
    MOST_SHOWN,
    ScoredPart,
    TaskOverlap,
    task_overlaps,
)
from rayembed_extras.clean_scores.plans import PlansUnknownError, plans_of
from rayembed_extras.clean_scores.scored_texts import task_texts
from rayembed_extras.clean_scores.search import CONTAINED, EQUAL, SIMILAR, TestTexts

logger = logging.getLogger(__name__)

SCORES_FILE, TEXTS_FILE = "clean_scores.csv", "seen_texts.csv"
_NAMED = 10
_COLUMNS = (
    *("task", "items", "seen", EQUAL, CONTAINED, SIMILAR),
    *("positives", "seen_positives", "documents", "seen_documents"),
    *("score", "clean", "low", "high", "note", "declared"),
)
_TEXT_COLUMNS = ("task", "split", "subset", "kind", "name", "seen", "text")


def clean_scores(scored: ScoredModels) -> Finding | None:
    """Search the model's batch plans for the test texts of all scored tasks, and compute the scores
    without them.

    None for models of others without declared training data.
    """
    names = [scoring.name for scoring in scored.judged.tasks if scoring.score is not None]
    declared = declared_tasks(scored.judged.meta, names)
    plans, reason = list[str](), "no batch plan is known"
    try:
        plans = plans_of(scored)
    except PlansUnknownError as error:
        reason = str(error)
        if not declared:
            return Finding(lines=(f"Clean scores are not known: {reason}.",))
    if not plans:
        return _of_declared(declared, len(names), reason) if declared else None
    failed, parts = dict[str, str](), list[ScoredPart]()
    folder = join(scored.storage, "clean-scores", uuid4().hex)
    try:
        texts = TestTexts(plans, folder, scored.execute)
        for part in _parts(scored, texts, failed):
            parts.append(part)
            _mark_searched(parts, texts)
        texts.search()
        _mark_searched(parts, texts)
    finally:
        remove_folder(folder)
    overlaps = task_overlaps(parts)
    return _finding(scored, overlaps, parts, declared, failed)


def _parts(scored: ScoredModels, texts: TestTexts, failed: dict[str, str]) -> Iterator[ScoredPart]:
    """Yield the scored splits and subsets with numbered texts; tasks whose data cannot be loaded go
    to `failed`, with the reason.
    """
    for scoring in scored.judged.tasks:
        for piece in scoring.pieces:
            if piece not in scoring.results:
                continue
            parts = []
            try:
                for part in task_texts(piece.load()):
                    entry = _entry(scoring, piece, part.split, part.subset)
                    if entry is not None:
                        parts.append(ScoredPart.of(piece.load().metadata, part, entry, texts))
            except Exception as error:  # noqa: BLE001 # one odd task of mteb's loses no other's
                failed[piece.name] = str(error) or type(error).__name__
            else:
                yield from parts


def _mark_searched(parts: Sequence[ScoredPart], texts: TestTexts) -> None:
    """Mark the parts whose texts are all searched, so that their texts are dropped."""
    waiting = [part for part in parts if part.items and part.last <= texts.searched]
    found = texts.matches if waiting else np.empty(0, np.uint8)
    for part in waiting:
        part.mark(found)


def _entry(scoring: Scoring, piece: object, split: str, subset: str) -> Mapping[str, object] | None:
    rows = scoring.results[piece].scores.get(split, [])  # type: ignore[index]
    return next((row for row in rows if row["hf_subset"] == subset), None)


def _of_declared(declared: Mapping[str, str], tasks: int, reason: str) -> Finding:
    rows = [[task, reason] for task, reason in declared.items()]
    line = f"{len(declared)} of {tasks} tasks are not zero-shot; {reason}."
    return Finding(Table(["Task", "Not zero-shot"], rows, title="Clean scores"), (line,))


def _finding(
    scored: ScoredModels,
    overlaps: Sequence[TaskOverlap],
    parts: Sequence[ScoredPart],
    declared: Mapping[str, str],
    failed: Mapping[str, str],
) -> Finding:
    shown = [one for one in overlaps if one.is_seen or one.task in declared]
    table = Table(
        ["Task", "Items", "Seen", "Positives", "Documents", "Score", "Clean", "Difference (95 %)"],
        [_row(one) for one in shown],
        title="Clean scores",
        align="lr",
        look="open",
    )
    lines = [
        f"{len([one for one in overlaps if one.seen])} of {len(overlaps)} tasks have queries or "
        "texts in the batch plan (seen: equal, contained or similar); clean is the score without "
        "them."
    ]
    if known := [one.score for one in overlaps if one.score is not None]:
        every = sum(score.all for score in known) / len(known)
        clean = sum(score.clean for score in known) / len(known)
        lines.append(
            f"Mean over the {len(known)} tasks with a clean score: {every:.4f} with all texts, "
            f"{clean:.4f} with clean ones."
        )
    lines += [f"{one.task} has no clean score: {one.note}." for one in shown if one.note]
    lines += [f"{task} is not zero-shot: {reason}." for task, reason in declared.items()]
    if failed:
        some = list(failed.items())[:_NAMED]
        more = "" if len(failed) <= _NAMED else f" and {len(failed) - _NAMED} more tasks"
        told = "; ".join(f"{task}: {reason}" for task, reason in some)
        lines.append(f"Without the texts of {len(failed)} tasks: {told}{more}.")
    return Finding(
        table if shown else None,
        tuple(lines),
        metrics={
            "clean": {one.task: one.score.clean for one in overlaps if one.score is not None},
            "seen_share": {one.task: one.seen / one.items for one in overlaps if one.items},
        },
        files={
            SCORES_FILE: _with_earlier(
                scored, SCORES_FILE, _COLUMNS, [_csv_row(one, declared) for one in overlaps]
            ),
            TEXTS_FILE: _with_earlier(scored, TEXTS_FILE, _TEXT_COLUMNS, _seen_texts(parts)),
        },
    )


def _row(one: TaskOverlap) -> list[object]:
    score = one.score
    apart: object = MISSING
    if score is not None and score.interval is not None:
        low, high = score.interval
        noise = ", noise" if score.is_noise else ""
        apart = f"{score.difference:+.4f} ({low:+.4f} to {high:+.4f}{noise})"
    return [
        one.task,
        f"{one.items:,}",
        _share(one.seen, one.items),
        _share(one.seen_positives, one.positives),
        _share(one.seen_documents, one.documents),
        Cell(one.main_score, digits=4),
        Cell(None if score is None else score.clean, digits=4),
        apart,
    ]


def _share(seen: int, all_: int) -> str:
    return f"{100 * seen / all_:.1f} %" if all_ else MISSING


def _csv_row(one: TaskOverlap, declared: Mapping[str, str]) -> list[object]:
    score = one.score
    low, high = ("", "") if score is None or score.interval is None else score.interval
    return [
        *(one.task, one.items, one.seen, *(one.ways[way] for way in (EQUAL, CONTAINED, SIMILAR))),
        *(one.positives, one.seen_positives, one.documents, one.seen_documents),
        *(one.main_score, "" if score is None else score.clean, low, high),
        *(one.note, declared.get(one.task, "")),
    ]


def _seen_texts(parts: Sequence[ScoredPart]) -> list[list[object]]:
    """Rows of `seen_texts.csv`."""
    rows: list[list[object]] = [
        [part.task, part.split, part.subset, "item", *seen]
        for part in parts
        for seen in part.seen_texts
    ]
    return rows[:MOST_SHOWN]


def _with_earlier(
    scored: ScoredModels, name: str, heads: Sequence[str], rows: list[list[object]]
) -> str:
    """CSV of the rows, behind those that an earlier evaluation wrote of other tasks."""
    path = Path(scored.judged.local) / name
    if path.is_file():
        stored = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
        now = {scoring.name for scoring in scored.judged.tasks}
        now |= {piece.name for scoring in scored.judged.tasks for piece in scoring.pieces}
        kept = [[row.get(head, "") for head in heads] for row in stored if row["task"] not in now]
        rows = [*kept, *rows]
    return _csv(heads, rows)


def _csv(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()


def compared_clean_scores(compared: ComparedModels) -> Finding | None:
    """Compare the models' clean scores side by side, on tasks with texts that any of them was
    trained on; None if no evaluation stored clean scores.
    """
    found = {label: _stored(folders) for label, folders in compared.results.items()}
    tasks = sorted({t for rows in found.values() for t, row in rows.items() if int(row["seen"])})
    if not tasks:
        return None
    rows = []
    for task in tasks:
        row: list[object] = [task]
        for of_model in found.values():
            stored = of_model.get(task)
            clean = None if stored is None or not stored["clean"] else float(stored["clean"])
            seen = "" if stored is None else _share(int(stored["seen"]), int(stored["items"]))
            row += [Cell(clean and 100 * clean, digits=2), seen]
        rows.append(row)
    heads = ["Task", *(head for label in found for head in (f"{label}, clean", "seen"))]
    without = [label for label, stored in found.items() if not stored]
    lines = [f"No clean scores are known of {', '.join(without)}."] if without else []
    return Finding(Table(heads, rows, title="Clean scores", align="lr", look="open"), tuple(lines))


def _stored(folders: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read the rows of the first `clean_scores.csv` in the folders, by task."""
    for folder in folders:
        path = join(folder, SCORES_FILE)
        if exists(path):
            rows = csv.DictReader(io.StringIO(read_bytes(path).decode()))
            return {row["task"]: row for row in rows}
    return {}
