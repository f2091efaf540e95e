"""Score a model's queries on the documents of the old model whose space it was trained to keep."""

import tempfile
from functools import partial
from statistics import fmean

from rayembed.config.mining import Teacher
from rayembed.config.run import Run
from rayembed.display.tables import Cell, Table
from rayembed.evaluation.bm25 import Bm25
from rayembed.evaluation.plan import retrieval_only
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.run_scores import run_model
from rayembed.evaluation.score import ModelScores, Store, gain, score
from rayembed.evaluation.tables import ScoreKey
from rayembed.losses.vector_distillation import VectorDistillation
from rayembed.machine.device import placed_here
from rayembed.pipeline.evaluate.findings import Finding, ScoredModels
from rayembed.pipeline.evaluate.guard import own_tasks
from rayembed_extras.model_pairs.pair_spec import pair_of

CURVE = "eval_old_index"
"""Name of the metrics in MLflow."""


def scores_on_old_index(subject: ScoredModels) -> Finding | None:
    """Compare the old model, the trained one, and the trained one's queries on the old model's
    documents; None for a run that keeps no old space.

    The trained model is the one that the run keeps, or the last stage's if it keeps the start. The
    own retrieval tasks are scored, or all retrieval tasks if none is own, in this process.
    """
    run = subject.run
    if run is None or (teacher := old_model(run)) is None:
        return None
    about = subject.about
    if about == subject.against:
        about = ScoreKey(run.stages[-1].name).label([stage.name for stage in run.stages])
    new = subject.models[about]
    spec, own = new.model, own_tasks(run)
    every = retrieval_only([scoring.factory for scoring in new.tasks])
    tasks = [task for task in every if task.name in own] or every
    if not tasks or spec is None or isinstance(spec, Bm25):
        return Finding(
            lines=(
                "no retrieval task was scored, so nothing says what the old index returns; set "
                "data.datasets.NAME.held_out={kind: fraction}, or evaluation.own_sets",
            )
        )
    old_spec = run_model(run, teacher.teacher, name=f"rayembed/{run.name}-old")
    assert not isinstance(old_spec, Bm25)
    learnt = run.stages[-1].loss.dimensions
    pair = pair_of(spec, old_spec, f"{new.meta.name}-old-index", learnt=learnt)
    device = "cuda" if placed_here(run.placement).on_gpu else "cpu"
    place = new.results.rsplit("/results/", 1)[0]
    scored = []
    for model in (old_spec, pair):
        with tempfile.TemporaryDirectory(prefix="embeddings-") as embeddings:
            store = Store(place, embeddings)
            scored.append(score(model, tasks, partial(run_here, device=device), store))
        for _, error in scored[-1].failed:
            raise error
    old, mixed = scored
    return _compared(old, new, mixed, [task.name for task in tasks])


def old_model(run: Run) -> Teacher | None:
    """Return the teacher in whose space the last stage keeps the vectors; None if there is none."""
    stage = run.stages[-1]
    keeps = isinstance(stage.loss, VectorDistillation) and stage.loss.projection is False
    return stage.teachers[0] if keeps and len(stage.teachers) == 1 else None


def _compared(old: ModelScores, new: ModelScores, mixed: ModelScores, tasks: list[str]) -> Finding:
    """Make the table of the three rows, each with the paired interval of its gain on the old model.

    Args:
        mixed: the new model's queries on the old model's documents.
    """
    means = [fmean(model.scores[task] for task in tasks) for model in (old, new, mixed)]
    rows = [
        ["old model", "old model", Cell(means[0], digits=4), ""],
        ["this model", "this model", Cell(means[1], digits=4), gain(new, old, tasks).shown(4)],
        ["this model", "old model", Cell(means[2], digits=4), gain(mixed, old, tasks).shown(4)],
    ]
    heads = ["Queries by", "Documents by", "Mean score", "Less the old model"]
    number = len(tasks)
    title = f"The old index under new queries, {number} {'task' if number == 1 else 'tasks'}"
    lines = []
    if means[1]:
        share = 100 * means[2] / means[1]
        apart = gain(mixed, new, tasks).shown(4)
        lines.append(
            f"new queries on the old documents reach {share:.1f} % of the score with all documents "
            f"embedded again: {apart}"
        )
    table = Table(heads, rows, title=title, align="llrl")
    values = {task: mixed.scores[task] for task in tasks}
    return Finding(table=table, lines=tuple(lines), metrics={CURVE: values})
