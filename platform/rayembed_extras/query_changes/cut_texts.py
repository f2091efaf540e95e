"""Count the texts longer than the length limit in each task and training data set, and average
their scores.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from mteb.types import PromptType

from rayembed.config.types import Role
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.display.tables import Cell, Table
from rayembed.errors import RayembedError
from rayembed.evaluation.jobs import TaskFactory, load_data
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.pooled.model import document_texts
from rayembed.pipeline.evaluate.findings import Finding, ScoredModels
from rayembed_extras.query_changes.causes import CutCounts
from rayembed_extras.query_changes.lengths import TokenLengths, lengths_of, tokens_in
from rayembed_extras.query_changes.search_data import (
    Place,
    Results,
    SearchData,
    results_by_place,
    search_data,
)
from rayembed_extras.query_changes.training_rows import TrainedText, trained_texts

FILE = "cut_texts.yaml"
"""File beside the results with the cut queries and relevant documents of each task."""

MOST_TEXTS = 50_000
"""Texts of a task and role that are counted; of more, evenly spaced ones."""

_SHOWN_SHARE = 0.01
"""Share of cut texts from which a task or data set is shown."""
_FIT = 99
"""Percentage of texts that the proposed limit reads whole."""
_STEP = 8
"""Proposed limits are multiples of it."""
_LINES = 5
_COLUMNS = ("input_column_name", "input1_column_name", "input2_column_name")


@dataclass(frozen=True)
class TextCount:
    """Number of texts, and number of texts that are longer than the limit."""

    texts: int = 0
    cut: int = 0
    limit: int = 0
    """Tokens that are read."""
    fitting: int = 0
    """Limit that `_FIT` percent of the texts are within; the limit itself if that is enough."""

    @property
    def share(self) -> float:
        """Share of the texts that are cut, from 0 to 1."""
        return self.cut / self.texts if self.texts else 0.0

    @classmethod
    def of(cls, tokens: np.ndarray, limit: int) -> "TextCount":
        """Count texts from their (N,) token numbers; a text within the limit may have any number up
        to it.
        """
        fitting = limit
        if len(tokens):
            needed = int(np.percentile(tokens, _FIT, method="inverted_cdf"))
            fitting = max(limit, -(-needed // _STEP) * _STEP)
        return cls(len(tokens), int((tokens > limit).sum()), limit, fitting)


@dataclass(frozen=True)
class CutRow:
    """Row of the table of cut texts: a task or a training data set."""

    name: str
    queries: TextCount
    documents: TextCount
    of_cut: tuple[float, ...] = ()
    """Scores of queries that are cut or have a relevant document that is."""
    of_whole: tuple[float, ...] = ()
    """Scores of all other queries."""
    settings: Mapping[Role, str] = field(default_factory=dict)
    """What to do, by role; `{}` stands for the proposed limit."""

    @property
    def share(self) -> float:
        """The larger share of cut texts, of queries or of documents."""
        return max(self.queries.share, self.documents.share)


def cut_texts(subject: ScoredModels) -> Finding | None:
    """Count the cut texts of all tasks, and of a run's training data; None if the model's length
    limit is unknown.
    """
    judged = subject.judged
    lengths = lengths_of(judged.model)
    if lengths is None:
        return None
    model: Any = judged.model
    rows, kept, missing = [], dict[str, dict[str, Any]](), []
    settings = _settings_of_scores(subject, lengths)
    for scoring in judged.tasks:
        parts = []
        try:
            for piece, result in scoring.results.items():
                places = results_by_place(result.scores)
                for part, place, cut in _task_rows(piece, model, lengths, places):
                    parts.append(part)
                    if cut is not None:
                        kept.setdefault(piece.name, {})["/".join(place)] = asdict(cut)
        except RayembedError as error:  # no data any more: other tasks are counted all the same
            missing.append(f"{scoring.name} is not counted: {error}")
            continue
        if parts:
            rows.append(_together(scoring.name, parts, settings))
    rows += _trained_rows(subject, model)
    return Finding(
        table=_table(rows),
        lines=(*_warnings(rows), *missing),
        metrics={
            "cut_queries": {row.name: row.queries.share for row in rows if row.queries.cut},
            "cut_documents": {row.name: row.documents.share for row in rows if row.documents.cut},
        },
        files={FILE: json.dumps(_with_earlier(subject, kept), ensure_ascii=False)},
    )


def _with_earlier(subject: ScoredModels, now: Mapping[str, Any]) -> dict[str, Any]:
    """Cut texts by task, with those that an earlier evaluation wrote of other tasks."""
    path = Path(subject.judged.local) / FILE
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    counted = {piece.name for scoring in subject.judged.tasks for piece in scoring.results}
    return {**{task: of for task, of in earlier.items() if task not in counted}, **now}


def count_cuts(
    lengths: TokenLengths,
    model: ModelSpec,
    data: SearchData,
    queries: Sequence[str],
    documents: Mapping[str, str],
) -> CutCounts:
    """Select the given queries and documents that exceed the model's limit, with their token
    counts.

    Args:
        queries: ids.
        documents: texts by id.
    """
    texts = {query: data.queries[query] for query in queries}
    asked = tokens_in(
        lengths, [*texts.values()], model.encode_spec(data.metadata, PromptType.query)
    )
    answers = tokens_in(
        lengths, [*documents.values()], model.encode_spec(data.metadata, PromptType.document)
    )
    limits = lengths.limits
    return CutCounts(
        _longer(texts, asked, limits["query"]),
        _longer(documents, answers, limits["document"]),
        limits["query"],
        limits["document"],
    )


def read_cuts(text: str) -> dict[str, dict[Place, CutCounts]]:
    """Parse the content of `FILE`: task → split and subset → cut texts."""
    found: dict[str, dict[Place, CutCounts]] = {}
    for task, places in json.loads(text).items():
        for place, cut in places.items():
            split, _, subset = place.partition("/")
            found.setdefault(task, {})[split, subset] = CutCounts(**cut)
    return found


def _longer(names: Iterable[str], tokens: np.ndarray, limit: int) -> dict[str, int]:
    return {n: int(count) for n, count in zip(names, tokens, strict=True) if count > limit}


def _task_rows(
    factory: TaskFactory,
    model: ModelSpec,
    lengths: TokenLengths,
    results: Mapping[Place, Results],
) -> Iterator[tuple[CutRow, Place, CutCounts | None]]:
    """Yield a row for each split and subset of a retrieval task, or one row for any other task."""
    searched = False
    for data in search_data(factory):
        searched = True
        yield _search_row(data, model, lengths, results.get(data.place, {}))
    if not searched and (row := _symmetric_row(factory, model, lengths)) is not None:
        yield row, ("", ""), None


def _search_row(
    data: SearchData,
    model: ModelSpec,
    lengths: TokenLengths,
    results: Results,
) -> tuple[CutRow, Place, CutCounts]:
    limits = lengths.limits
    relevant = {query: data.relevant(query) for query in data.judged if query in data.queries}
    wanted = {document for documents in relevant.values() for document in documents}
    as_query, as_document = (
        model.encode_spec(data.metadata, side) for side in (PromptType.query, PromptType.document)
    )
    queries = tokens_in(lengths, [*data.queries.values()], as_query)
    positives = data.documents(wanted)
    cut = CutCounts(
        _longer(data.queries, queries, limits["query"]),
        _longer(
            positives,
            tokens_in(lengths, [*positives.values()], as_document),
            limits["document"],
        ),
        limits["query"],
        limits["document"],
    )
    some = document_texts(data.corpus, _spaced(len(data.corpus)))
    documents = tokens_in(lengths, some, as_document)
    scores: dict[bool, list[float]] = {True: [], False: []}
    for query, result in results.items():
        touched = query in cut.queries or not cut.documents.keys().isdisjoint(
            relevant.get(query, ())
        )
        scores[touched].append(result.score)
    row = CutRow(
        data.name,
        TextCount.of(queries, limits["query"]),
        TextCount.of(documents, limits["document"]),
        tuple(scores[True]),
        tuple(scores[False]),
    )
    return row, data.place, cut


def _spaced(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, MOST_TEXTS)).astype(np.int64))


def _symmetric_row(factory: TaskFactory, model: ModelSpec, lengths: TokenLengths) -> CutRow | None:
    """Count the cut texts of a task without queries and documents; None if its text columns are
    unknown.
    """
    task = factory.load()
    columns = [getattr(task, name) for name in _COLUMNS if hasattr(task, name)]
    columns += getattr(task, "column_names", ())
    if not columns:
        return None
    load_data(task)
    texts = list(dict.fromkeys(_texts_in(task.dataset, columns, set(task.eval_splits))))
    task.unload_data()
    spec = model.encode_spec(task.metadata, getattr(task, "input1_prompt_type", None))
    chosen = [texts[place] for place in _spaced(len(texts))] if texts else []
    count = TextCount.of(tokens_in(lengths, chosen, spec), lengths.limits[spec.role])
    return CutRow(task.metadata.name, count, TextCount())


def _texts_in(data: Any, columns: Sequence[str], splits: set[str]) -> Iterator[str]:
    """Yield the texts of the given columns in the evaluated splits, at any depth of nesting."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        evaluated = splits & data.keys()
        for name in evaluated or data.keys():
            yield from _texts_in(data[name], columns, splits)
    elif hasattr(data, "column_names"):
        for column in columns:
            if column in data.column_names:
                yield from _texts_in(list(data[column]), columns, splits)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _texts_in(item, columns, splits)


def _together(name: str, parts: Sequence[CutRow], settings: Mapping[Role, str]) -> CutRow:
    """Merge the rows of a task's splits and subsets into one row."""
    return CutRow(
        name,
        _sum([part.queries for part in parts]),
        _sum([part.documents for part in parts]),
        tuple(score for part in parts for score in part.of_cut),
        tuple(score for part in parts for score in part.of_whole),
        settings,
    )


def _sum(counts: Sequence[TextCount]) -> TextCount:
    return TextCount(
        sum(count.texts for count in counts),
        sum(count.cut for count in counts),
        max(count.limit for count in counts),
        max(count.fitting for count in counts),
    )


def _trained_rows(subject: ScoredModels, model: Any) -> Iterator[CutRow]:
    """Yield a row for each training data set of each stage of a run."""
    run = subject.run
    plain = lengths_of(model)
    if run is None or plain is None:
        return
    # DeepSpeed, which an evaluation does without.
    from rayembed.training.contrastive.step import stage_tokenizer

    for stage in run.stages:
        if stage.name not in subject.plans:
            continue
        tokenizer: Any = stage_tokenizer(stage, plain.original)
        lengths = TokenLengths.of(tokenizer, tokenizer.max_lengths)
        own = {"query": stage.query_max_length, "document": stage.document_max_length}
        settings: dict[Role, str] = {}
        for role in lengths.limits:
            where = "model" if own[role] is None else f"stages.{stage.name}"
            settings[role] = f"set {where}.{role}_max_length={{}} {_IF_LONG_ENOUGH}"
        texts_of = trained_texts(BatchPlan.open(subject.plans[stage.name]))
        for name, texts in sorted(texts_of.items()):
            counts = {role: _trained_count(texts, role, lengths) for role in lengths.limits}
            yield CutRow(
                f"{name} (training, {stage.name})",
                counts["query"],
                counts["document"],
                settings=settings,
            )


def _trained_count(texts: Iterable[TrainedText], role: Role, lengths: TokenLengths) -> TextCount:
    """Count the cut training texts of one role, over all instructions."""
    by_instruction: dict[str, list[str]] = {}
    for one in texts:
        if one.role == role:
            by_instruction.setdefault(one.instruction, []).append(one.text)
    tokens = [lengths.tokens(some, role, head) for head, some in by_instruction.items()]
    joined = np.concatenate([np.zeros(0, np.int64), *tokens])
    return TextCount.of(joined, lengths.limits[role])


_IF_LONG_ENOUGH = "if the backbone has as many positions, or split longer texts"


def _settings_of_scores(subject: ScoredModels, lengths: TokenLengths) -> dict[Role, str]:
    """Role → advice on the cut texts of a task."""
    found: dict[Role, str] = {}
    for role, limit in lengths.limits.items():
        if limit < lengths.own[role] and subject.run is None:
            found[role] = "set model.max_length={}"
        elif limit < lengths.own[role]:
            found[role] = "rayembed evaluate with model.max_length={} reads them"
        elif subject.run is not None:
            found[role] = f"set model.{role}_max_length={{}} {_IF_LONG_ENOUGH}"
        else:
            found[role] = (
                f"the model reads no more: split longer texts, or train it with "
                f"model.{role}_max_length={{}}"
            )
    return found


def _warnings(rows: Sequence[CutRow]) -> Iterator[str]:
    """Yield a sentence for each task or data set, and role, with many cut texts."""
    lines = [
        f"{_percent(count.share)} of the {kind} of {row.name} ({count.cut:,} of {count.texts:,}) "
        f"are longer than the {count.limit} tokens that are read; {_FIT} % are within "
        f"{count.fitting}: {row.settings[role].format(count.fitting)}"
        for row in rows
        for role, kind, count in _by_role(row)
        if count.share >= _SHOWN_SHARE
    ]
    yield from lines[:_LINES]
    if len(lines) > _LINES:
        yield f"{len(lines) - _LINES} further tasks or data sets are in the table"


def _by_role(row: CutRow) -> Iterator[tuple[Role, str, TextCount]]:
    yield "query", "queries" if row.documents.texts else "texts", row.queries
    yield "document", "documents", row.documents


def _table(rows: Sequence[CutRow]) -> Table | None:
    """Tabulate the tasks and data sets with at least 1 % cut texts; None if there are none."""
    shown = [row for row in rows if row.share >= _SHOWN_SHARE]
    if not shown:
        return None
    return Table(
        ["Task or data set", "Limit", "Cut queries", "Cut documents", "Score, cut", "Score, whole"],
        [
            [
                row.name,
                _limits(row),
                _percent(row.queries.share),
                _percent(row.documents.share) if row.documents.texts else "–",
                _mean(row.of_cut),
                _mean(row.of_whole),
            ]
            for row in shown
        ],
        title="Texts longer than the length limit",
        align="lrrrrr",
        caption="Cut: scores of queries that are cut, or of which a relevant document is",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _limits(row: CutRow) -> str:
    limits = dict.fromkeys((row.queries.limit, row.documents.limit or row.queries.limit))
    return "/".join(map(str, limits))


def _mean(scores: Sequence[float]) -> object:
    return f"{fmean(scores):.3f} ({len(scores):,})" if scores else Cell(None)
