"""Report the queries whose scores changed: a trained model against its start, or compared
models.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rayembed.assets.storage import exists, join, read_bytes
from rayembed.config.own_sets import RetrievalSet
from rayembed.display.tables import Table, show
from rayembed.errors import RayembedError
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.score import ModelScores
from rayembed.evaluation.tables import ScoreKey
from rayembed.pipeline.evaluate.findings import ComparedModels, Finding, ScoredModels
from rayembed.results.files import described_in
from rayembed_extras.query_changes.causes import CutCounts
from rayembed_extras.query_changes.changes import (
    SHOWN,
    Cuts,
    Sources,
    TaskChanges,
    causes_table,
    changes_in,
)
from rayembed_extras.query_changes.cut_texts import FILE, count_cuts, read_cuts
from rayembed_extras.query_changes.lengths import lengths_of
from rayembed_extras.query_changes.page import changes_page
from rayembed_extras.query_changes.search_data import (
    Place,
    Results,
    SearchData,
    piece_results,
    results_by_place,
    search_data,
    without_rankings,
)
from rayembed_extras.query_changes.training_rows import rows_with_negatives

PAGE = "query_changes.html"
"""File of the page beside the results, or with the comparison."""

_LINES = 5
"""Tasks that have a line in the report."""


def changes_of_run(subject: ScoredModels) -> Finding | None:
    """Compare the scores of each query between a trained model and its start; None if the start was
    not scored.
    """
    about = _trained(subject)
    if subject.against is None or about == subject.against:
        return None
    models = (subject.models[subject.against], subject.models[about])
    before, after = (piece_results(model.tasks) for model in models)
    cuts = (_counted(models[0]), _counted(models[1]))
    sources = Sources(cuts, partial(rows_with_negatives, list(subject.plans.values())))
    tasks, hints = list[TaskChanges](), list[str]()
    for piece in after:
        if piece not in before:
            continue
        try:
            for data in search_data(piece):
                changes = _changes(data, before[piece], after[piece], sources)
                tasks += [] if changes is None else [changes]
        except RayembedError as error:  # no data any more: other tasks are shown all the same
            hints.append(f"left out: {piece.name}: {error}")
    tasks.sort(key=lambda task: not task.own)
    finding = _finding({PAGE: ((subject.against, about), tasks)}, subject.judged.results)
    old = [name for model in models for name in without_rankings(model.tasks)]
    if old:
        hints.append(
            f"left out: {', '.join(dict.fromkeys(old))}, whose results were stored without "
            f"rankings by an older version; remove their files in {models[0].results} and "
            f"{models[1].results} and run again"
        )
    return replace(finding, lines=(*finding.lines, *hints))


def _trained(subject: ScoredModels) -> str:
    """Return the label of the model to compare with the start: the last stage's if the run kept the
    start itself.
    """
    if subject.run is None or subject.about != subject.against:
        return subject.about
    stages = [stage.name for stage in subject.run.stages]
    return ScoreKey(stages[-1]).label(stages)


def _changes(
    data: SearchData,
    before: Mapping[Place, Results],
    after: Mapping[Place, Results],
    sources: Sources,
) -> TaskChanges | None:
    if data.place not in before or data.place not in after:
        return None
    return changes_in(data, before[data.place], after[data.place], sources)


def _counted(scored: ModelScores) -> Cuts | None:
    """Return a function that finds the cut texts of a scored model; None if its length limit is
    unknown.
    """
    lengths, model = lengths_of(scored.model), scored.model
    if lengths is None:
        return None
    spec: Any = model
    return partial(count_cuts, lengths, spec)


def changes_of_comparison(subject: ComparedModels) -> Finding | None:
    """Compare the baseline with every other model query by query, on the own sets whose folders are
    given; None without results to compare.
    """
    base, others = subject.baseline, [m for m in subject.results if m != subject.baseline]
    if base is None or base not in subject.results or not others:
        return None
    kept = {model: _kept(folders) for model, folders in subject.results.items()}
    missing = sorted(
        task
        for task in kept[base]
        if task not in subject.own_sets and any(task in kept[model] for model in others)
    )
    pages = {}
    for model in others:
        name = PAGE if len(others) == 1 else f"query_changes-{_file_part(model)}.html"
        common = [task for task in kept[model] if task in kept[base] and task in subject.own_sets]
        tasks = [
            changes
            for task in common
            for changes in _of_own_set(subject, task, kept[base][task], kept[model][task])
        ]
        if common:
            pages[name] = ((base, model), tasks)
    if not pages and not missing:
        return None
    finding = _finding(pages, subject.output)
    if missing:
        sets = " ".join(f"--own-set {task}=FOLDER" for task in missing)
        hint = f"which queries changed and why is shown where folders of own sets are named: {sets}"
        return replace(finding, lines=(*finding.lines, hint))
    return finding


def _file_part(label: str) -> str:
    return re.sub(r"[^\w.@-]+", "-", label)


def _kept(folders: Sequence[str]) -> dict[str, tuple[str, dict[Place, Results]]]:
    """Own retrieval sets whose results include single queries: name → (folder of the results,
    results by split and subset).
    """
    found: dict[str, tuple[str, dict[Place, Results]]] = {}
    for folder in folders:
        for task, (facts, _) in described_in(folder).items():
            path = join(folder, f"{task}.json")
            if not facts.dataset.startswith("own/") or task in found or not exists(path):
                continue
            rows = json.loads(read_bytes(path))["scores"]
            if places := results_by_place(rows):
                found[task] = folder, places
    return found


def _of_own_set(
    subject: ComparedModels,
    task: str,
    before: tuple[str, Mapping[Place, Results]],
    after: tuple[str, Mapping[Place, Results]],
) -> Iterator[TaskChanges]:
    """Yield the changed queries of each split and subset of an own set.

    Raises:
        RayembedError: the set cannot be read, or is another one than was scored.
    """
    path = subject.own_sets[task]
    places = [place for place in after[1] if place in before[1]]
    sources = Sources((_stored_cuts(before[0], task), _stored_cuts(after[0], task)))
    for split in dict.fromkeys(split for split, _ in places):
        languages = tuple(
            subset for part, subset in places if part == split and subset != "default"
        )
        own = RetrievalSet(name=task, path=path, split=split, languages=languages)
        for data in search_data(OwnTask(own)):
            _check_same(data, path, before[1][data.place], after[1][data.place])
            changes = changes_in(data, before[1][data.place], after[1][data.place], sources)
            if changes is not None:
                yield changes


def _check_same(data: SearchData, path: str, *results: Results) -> None:
    documents = set(data.corpus["id"])
    for of_model in results:
        ranked = {document for result in of_model.values() for document in result.best}
        if of_model.keys() != data.queries.keys() or ranked - documents:
            raise RayembedError(
                f"--own-set: the set at {path!r} has other queries or documents than the stored "
                f"results of {data.name!r}; name the folder of the set that was scored, or score "
                "both models again"
            )


def _stored_cuts(folder: str, task: str) -> Cuts | None:
    """Return a function that looks up a task's cut texts in the stored file of an earlier
    evaluation.
    """
    path = join(folder, FILE)
    if not exists(path):
        return None
    stored = read_cuts(read_bytes(path).decode()).get(task, {})

    def look(data: SearchData, queries: Sequence[str], documents: Mapping[str, str]) -> Any:
        cut = stored.get(data.place)
        if cut is None:
            return None
        return CutCounts(
            {query: cut.queries[query] for query in queries if query in cut.queries},
            {name: cut.documents[name] for name in documents if name in cut.documents},
            cut.query_limit,
            cut.document_limit,
        )

    return look


def _finding(
    pages: Mapping[str, tuple[tuple[str, str], Sequence[TaskChanges]]], folder: str
) -> Finding:
    """Build the report: a table of causes, a sentence for each task, and the HTML pages.

    Args:
        pages: file name → labels of both models, and their changed queries.
        folder: of the pages, for readers.
    """
    lines = [
        f"{task.name}: {task.worse:,} of {task.queries:,} queries are worse with {after} than with "
        f"{before}, {task.better:,} better (mean {task.means[0]:.3f} → {task.means[1]:.3f})"
        for (before, after), tasks in pages.values()
        for task in tasks
    ]
    if len(lines) > _LINES:
        lines = [*lines[:_LINES], f"{len(lines) - _LINES} further tasks are on the page"]
    every = [task for _, tasks in pages.values() for task in tasks]
    if not every:
        return Finding()
    rows = [[kind, losses, gains, todo] for kind, losses, gains, todo in causes_table(every)]
    table = Table(
        ["Likely cause of the lower score", "Losses", "Gains", "What to do"],
        rows,
        title=f"Queries whose score changed most, up to {SHOWN} losses and gains a task",
        align="lrrl",
    )
    where = (
        f"both rankings of each, side by side: {', '.join(join(folder, name) for name in pages)}"
    )
    return Finding(
        table,
        (*lines, where),
        files={name: changes_page(*labels, tasks) for name, (labels, tasks) in pages.items()},
        # The card goes to other machines: no folder of this one.
        markdown="\n\n".join([show(table, "markdown").strip(), *lines]),
    )
