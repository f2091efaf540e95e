"""Score models; training, validation, evaluation and analysis all use this module.

A model, tasks, whoever embeds, and where results lie: what is scored already is read, what is
missing is done by mteb, and every result is written down as it comes. Results are found by the
model's name and revision; the revision names the weights and all else that decides a vector or what
stands before a text, and a result file names its data, so that a score of something else is never
taken for this one.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import mteb
from mteb.models import ModelMeta

from rayembed.assets.cache import cache_folder
from rayembed.assets.storage import is_remote, join
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.document import read_yaml, write_yaml
from rayembed.config.evaluation import BM25
from rayembed.errors import ArtifactError, ConfigError, RayembedError
from rayembed.evaluation.bm25 import Bm25
from rayembed.evaluation.hybrid import Baselines
from rayembed.evaluation.jobs import (
    COST,
    FURTHER,
    TASK_RESULT,
    Done,
    Job,
    Outcome,
    ScoreTask,
    TaskFactory,
    longest_first,
)
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.plan import Scoring, find_results, retrieval_only
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.here import finish
from rayembed.evaluation.prompts_table import prompts_record, with_earlier_tasks
from rayembed.models.versions import LIBRARIES, versions, warn_of_other_versions
from rayembed.results.costs import COSTS_FILE, Cost, costs_yaml, read_costs, total
from rayembed.results.files import CONDITIONS_FILE
from rayembed.results.intervals import PairedDifference, mean_difference
from rayembed.results.items import Items, item_scores
from rayembed.results.scores import BM25_ROW
from rayembed.results.writer import ResultWriter, open_results

logger = logging.getLogger(__name__)

_PACKAGES = ("mteb", "numpy", "scikit-learn", "scipy", *LIBRARIES)
"""Packages whose versions stand beside the results."""

_SECONDS_OF_A_WRITE = 60.0
"""Longest wait for another process that writes a result of BM25."""

Pool = Callable[[Sequence[Job], ModelSpec, EmbeddingStore | None], Iterator[Done]]
"""Does jobs with a spec's model and gives each with its outcome, as they come: workers on Ray
(`pooled/on_ray.run_jobs`) or this process (`pooled/here.run_here`)."""


@dataclass(frozen=True)
class Store:
    """Locations of stored results and embeddings, so that nothing is computed twice."""

    results: str
    """Folder or object-storage prefix that holds mteb's result layout."""
    embeddings: str | None = None
    """Folder or object-storage prefix; None: embeddings are not stored."""
    precision: Literal["float32", "float16"] = "float32"
    """Number type of stored embeddings."""

    def open_results(self) -> StoredFolder:
        """Open the stored results, with a local copy if the storage is remote."""
        if not is_remote(self.results):
            return StoredFolder(self.results, Path(self.results), recursive=True)
        key = hashlib.sha256(self.results.encode()).hexdigest()[:12]
        return StoredFolder(self.results, cache_folder() / "evaluation" / key, recursive=True)

    def embeddings_of(self, spec: ModelSpec) -> EmbeddingStore | None:
        """Open the store of a model's embeddings; None if embeddings are not stored."""
        if self.embeddings is None:
            return None
        return EmbeddingStore(join(self.embeddings, spec.fingerprint), self.precision)


@dataclass
class ModelScores:
    """Scores of a model by task, and where their files are."""

    meta: ModelMeta
    results: str
    """mteb's result files of the model's revision, in storage."""
    local: Path
    """The same on this machine."""
    tasks: list[Scoring] = field(default_factory=list)
    model: ModelSpec | Bm25 | None = None
    """The model that was scored."""
    costs: dict[str, Cost] = field(default_factory=dict)
    """Cost of the searched corpora by mteb's name of the task, as far as they were measured."""
    further: dict[str, "ModelScores"] = field(default_factory=dict)
    """Scores of the rows beside the model, by their names: BM25, hybrid, reranked."""

    @property
    def failed(self) -> list[tuple[str, RayembedError]]:
        """List tasks without a score of the model or of one of its baselines, with the reasons."""
        failed = {task.name: task.error for task in self.tasks if task.error is not None}
        for row, scored in self.further.items():
            for name, error in scored.failed:
                if name not in failed:
                    failed[f"{name}, {row}"] = error
        return list(failed.items())

    def cost(self, scoring: Scoring) -> Cost:
        """Cost of a task's corpora; for an aggregate task, the sum over its members."""
        names = dict.fromkeys(piece.name for piece in scoring.pieces)
        return total({name: self.costs[name] for name in names if name in self.costs})

    @property
    def scores(self) -> dict[str, float]:
        """Main score of each completed task."""
        return {task.name: task.score for task in self.tasks if task.score is not None}

    @property
    def items(self) -> dict[str, list[Items]]:
        """Outcomes of test items by task, for each subset in sorted order; tasks without such are
        left out.
        """
        by_task: dict[str, list[Items]] = {}
        for task in self.tasks:
            rows = [] if task.result is None else list(chain(*task.result.scores.values()))
            ordered = sorted(rows, key=lambda row: str(row["hf_subset"]))
            found = [items for row in ordered if (items := item_scores(row)) is not None]
            if found and len(found) == len(rows):
                by_task[task.name] = found
        return by_task


def score(
    model: ModelSpec | Bm25,
    tasks: Sequence[TaskFactory],
    pool: Pool,
    store: Store,
    *,
    about: Mapping[str, str] | None = None,
    baselines: Baselines | None = None,
    price_per_hour: float | None = None,
    beside: Sequence[Job] = (),
    on_done: Callable[[Done], None] = lambda done: None,
) -> ModelScores:
    """Score the model on the tasks; existing results are reused.

    A task that fails stops no other: `ModelScores.failed` tells of it.

    Args:
        about: further files that say how the results were made, by their names.
        baselines: rows to score beside the model, on some of the tasks; None: none.
        price_per_hour: of one worker, stored with the measured speed; None: as stored before.
        beside: jobs that are no tasks of mteb and are done by the same workers.
        on_done: takes each of those with its outcome, as they come.

    Raises:
        ArtifactError: another process writes the results of this model.
        ConfigError: BM25 is asked for tasks that are no retrieval.
        RayembedError: the model cannot be loaded, or the cluster has not got what it needs.
    """
    meta = meta_of(model)
    if isinstance(model, Bm25):
        tasks = _of_bm25(tasks)
    results = store.open_results()
    with open_results(results.local, meta) as writer:
        results.fetch()
        of_model = _opened(writer, tasks, results, price_per_hour)
        of_model.scored.model = model
        rows = {_MODEL: of_model}
        if baselines is not None and not isinstance(model, Bm25):
            chosen = retrieval_only([task for task in tasks if task.name in baselines.tasks])
            for name in baselines.rows if chosen else ():
                beside_it = ResultWriter(results.local, baselines.meta(name, meta))
                rows[name] = _opened(beside_it, chosen, results, price_per_hour)
                of_model.scored.further[name] = rows[name].scored
        for name, row in rows.items():
            of_words = name == BM25_ROW  # the same of every model
            first = row.describe(None if of_words else model, None if of_words else about)
            if name == _MODEL:
                warn_of_other_versions(f"results in {row.scored.results!r}", read_yaml(first))
        try:
            _do_what_is_missing(rows, model, pool, store, results, baselines, beside, on_done)
        finally:
            results.keep()
    return of_model.scored


_MODEL = ""
"""Name of the model's own row."""


@dataclass
class _Row:
    """Scores of the model or of one of its baselines, with the writer of the results."""

    scored: ModelScores
    writer: ResultWriter
    price_per_hour: float | None

    def describe(self, model: ModelSpec | Bm25 | None, about: Mapping[str, str] | None) -> str:
        """Write further files, the model's prompts and, the first time, library versions; return
        the versions as YAML.
        """
        for name, text in (about or {}).items():
            self.writer.keep(name, text)
        if model is not None and not isinstance(model, Bm25):
            record = prompts_record(model, [task.factory.load() for task in self.scored.tasks])
            earlier = self.writer.kept(CONDITIONS_FILE)
            self.writer.keep(CONDITIONS_FILE, write_yaml(with_earlier_tasks(record, earlier)))
        return self.writer.keep_first("versions.yaml", write_yaml(versions(_PACKAGES)))

    def take(self, scoring: Scoring, piece: TaskFactory, outcome: Outcome) -> None:
        """Write the result and the cost of a part of a task, unless a result exists already."""
        if piece in scoring.results:
            return
        scoring.take(piece, mteb.TaskResult.from_dict(outcome[TASK_RESULT]), self.writer)
        costs = self.scored.costs
        measured = Cost(**outcome.get(COST, {}))
        if measured == Cost():  # a task without a search
            return
        cost = costs.get(piece.name, Cost()) + measured
        costs[piece.name] = replace(cost, price_per_hour=self.price_per_hour)
        self.writer.keep(COSTS_FILE, costs_yaml(costs))


def _opened(
    writer: ResultWriter,
    tasks: Sequence[TaskFactory],
    results: StoredFolder,
    price_per_hour: float | None,
) -> _Row:
    """Make the `_Row` of a writer, with the scores and costs already stored in its folder."""
    place = writer.place.relative_to(results.local).as_posix()
    scored = ModelScores(writer.meta, join(results.place, place), writer.place)
    scored.tasks = find_results(tasks, writer)
    scored.costs = read_costs(writer.kept(COSTS_FILE) or "")
    if price_per_hour is None:
        price_per_hour = total(scored.costs).price_per_hour
    elif scored.costs:
        for task, cost in scored.costs.items():
            scored.costs[task] = replace(cost, price_per_hour=price_per_hour)
        writer.keep(COSTS_FILE, costs_yaml(scored.costs))
    return _Row(scored, writer, price_per_hour)


def meta_of(model: ModelSpec | Bm25) -> ModelMeta:
    """Return mteb's metadata of a model."""
    return model.mteb_model_meta if isinstance(model, Bm25) else model.meta


def _of_bm25(tasks: Sequence[TaskFactory]) -> list[TaskFactory]:
    """Select the tasks that BM25 can run, and warn of the others."""
    kept = retrieval_only(tasks)
    if left_out := [task.name for task in tasks if task not in kept]:
        told = ", ".join(left_out[:5]) + (" …" if len(left_out) > 5 else "")
        if not kept:
            raise ConfigError(f"{BM25} scores retrieval tasks only, not {told}")
        logger.warning("%s scores retrieval only: %d tasks skipped (%s)", BM25, len(left_out), told)
    return kept


def _do_what_is_missing(
    rows: Mapping[str, _Row],
    model: ModelSpec | Bm25,
    pool: Pool,
    store: Store,
    results: StoredFolder,
    baselines: Baselines | None,
    beside: Sequence[Job],
    on_done: Callable[[Done], None],
) -> None:
    """Run the jobs of tasks without a result, and record each result when its job finishes."""
    by_piece: dict[TaskFactory, list[tuple[str, Scoring]]] = {}
    for name, row in rows.items():
        for scoring in row.scored.tasks:
            for job in scoring.missing():
                # A member of an aggregate may be asked for by its own name, too.
                by_piece.setdefault(job.task, []).append((name, scoring))
    scored = rows[_MODEL].scored
    if count := len(scored.scores):
        logger.info("%d of %d tasks are scored already", count, len(scored.tasks))
    jobs = [
        ScoreTask(piece, baselines if any(name != _MODEL for name, _ in missing) else None)
        for piece, missing in by_piece.items()
    ]
    for done in _run([*jobs, *beside], model, pool, store):
        if not isinstance(done.job, ScoreTask):
            _tell(done, "done")
            on_done(done)
            continue
        told = _take(done, done.job.task, by_piece[done.job.task], rows, results)
        if told or done.outcome is None:
            _tell(done, told)
        _keep_so_far(results)


def _take(
    done: Done,
    piece: TaskFactory,
    missing: Sequence[tuple[str, Scoring]],
    rows: Mapping[str, _Row],
    results: StoredFolder,
) -> str:
    """Store the outcome of a part of a task for the models that lack it; return the log text of
    their scores.

    Args:
        missing: name of each row, with its task.
    """
    shown = []
    for name, scoring in missing:
        scoring.seconds += done.seconds
        if done.outcome is None:
            scoring.error = done.error
        elif name == _MODEL:
            rows[name].take(scoring, piece, done.outcome)
        else:
            _take_beside(rows[name], scoring, piece, done.outcome[FURTHER][name], results)
        if scoring.score is not None:
            scored = rows[name].scored
            of = f" ({len(scored.scores)} of {len(scored.tasks)})" if name == _MODEL else ""
            shown.append(f"{name} {scoring.score:.4f}{of}".strip())
    return ", ".join(shown)


def _take_beside(
    row: _Row, scoring: Scoring, piece: TaskFactory, outcome: Outcome, results: StoredFolder
) -> None:
    """Write the result of a baseline. BM25's are those of every model, and evaluations of other
    models may write them at the same time.
    """
    with open_results(results.local, row.scored.meta, _SECONDS_OF_A_WRITE):
        row.take(scoring, piece, outcome)


def _run(jobs: Sequence[Job], model: ModelSpec | Bm25, pool: Pool, store: Store) -> Iterator[Done]:
    """Run the jobs and yield their outcomes; BM25 runs here, other models in the pool."""
    if not jobs:
        return
    if isinstance(model, Bm25):
        for job in longest_first(jobs):
            yield finish(job, partial(Bm25, model.mteb_model_meta))
        return
    yield from pool(jobs, model, store.embeddings_of(model))


def _keep_so_far(results: StoredFolder) -> None:
    """Copy the results so far to storage, so that a killed job can resume; a failed copy causes
    only a warning.
    """
    try:
        results.keep()
    except ArtifactError as error:
        logger.warning("%s", error)


def _tell(done: Done, what: str) -> None:
    if done.error is not None:
        logger.warning("%s failed: %s", done.job.name, done.error)
    else:
        logger.info("%s  %s, %.1f s", done.job.name, what, done.seconds)


def gain(model: ModelScores, base: ModelScores, tasks: Sequence[str]) -> PairedDifference:
    """Mean difference over tasks between a model's scores and the base's, with a paired bootstrap
    interval over items. Tasks are not resampled, because the models are judged by these tasks,
    not by a sample.
    """
    differences = {task: model.scores[task] - base.scores[task] for task in tasks}
    return mean_difference(differences, model.items, base.items)
