"""Scores of a run's models in this process, by the one road."""

import tempfile

from rayembed.evaluation.bm25 import Bm25, bm25_meta
from rayembed.evaluation.loaded_spec import loaded_spec
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.rayembed_spec import lengths_read
from rayembed.evaluation.run_scores import decided, run_model, run_prompts
from rayembed.evaluation.score import Store, score


def tasks_of(run):
    """Fresh tasks of the scores after training."""
    return [factory.load() for factory in task_factories(run.scores)]


def evaluate(
    model, run, *, name, revision, results_folder, dimension=None, num_context=None, prompts=None
):
    """Main score by task of a model in memory, or of BM25."""
    if isinstance(model, Bm25):
        return _scores(Bm25(bm25_meta(name, revision)), run, results_folder)
    prompts = prompts or run_prompts(run)
    others = [dimension, num_context]
    meta = model_meta(
        name,
        f"{'' if dimension is None else f'first{dimension}-'}{revision}-"
        f"{decided(tasks_of(run), prompts, *others)[:8]}",
        embed_dim=dimension or model.dimensions[0],
        similarity_fn_name="cosine",
    )
    lengths = lengths_read(getattr(model, "config", run.model))  # made-up models have none
    spec = loaded_spec(model, meta, prompts, lengths, num_context=num_context, dimension=dimension)
    return _scores(spec, run, results_folder)


def evaluate_reference(
    reference, run, *, name, results_folder, dimension=None, without_context=False
):
    """Main score by task of a saved model, or of `bm25`, as a training run takes them."""
    spec = run_model(
        run,
        str(reference),
        name=f"rayembed/{name}",
        dimensions=dimension,
        without_context=without_context,
    )
    return _scores(spec, run, results_folder)


def _scores(model, run, results_folder):
    with tempfile.TemporaryDirectory() as embeddings:
        store = Store(str(results_folder), embeddings)
        scored = score(model, task_factories(run.scores), run_here, store)
    for _, error in scored.failed:
        raise error
    return scored.scores
