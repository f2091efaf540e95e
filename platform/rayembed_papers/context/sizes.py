"""Score a contextual model with fewer context documents than its maximum (CDE, Figure 16).

"Because the model includes an optional null token, we can supply any number of contextual inputs"
(arXiv 2410.02525, section 10.5): the null token replaces missing documents.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from rayembed.assets.resolver import resolve_model
from rayembed.config.evaluation import CONTEXT_SEED
from rayembed.config.own_sets import RetrievalSet
from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.loaded_spec import loaded_spec, scores_of
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.rayembed_spec import lengths_read
from rayembed.evaluation.run_scores import decided, prompts_for
from rayembed.models.cde.model import CDE
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.passes.encoding import random_documents
from rayembed.recipes.sample import RETRIEVAL_TASKS

logger = logging.getLogger(__name__)

SizeScores = dict[int, dict[str, list[float]]]
"""Number of context documents → task → its score with each draw."""


def scores_by_size(
    reference: str | Path,
    run: Run,
    *,
    name: str,
    results_folder: str | Path,
    sizes: Sequence[int],
    draws: int,
    tasks: Sequence[str] = RETRIEVAL_TASKS,
    device: str = "cpu",
) -> SizeScores:
    """Score a saved model with given numbers of each task's documents as context.

    The documents of a draw are the first ones of a larger size's draw by the same seed; the first
    draw is that of every evaluation. Without documents there is one draw. Results are kept
    in the folder and not taken again.

    Args:
        run: its own sets are the tasks; instructions are those of its evaluation.
        sizes: at most as many as the model takes.

    Raises:
        AssetError, ArtifactError: the reference leads to no model, or to one without context.
        ConfigError: a size, a task that cannot be, or a run that does not score the sample.
    """
    folder, places = contextual_folder(str(reference))
    factories = tasks_of(run, tasks)
    check_sizes(sizes, places, factories)
    prompts = prompts_for(folder, run)
    made = [factory.load() for factory in factories]
    data = {task.metadata.name: task.metadata.dataset["revision"] for task in made}
    weights = weights_fingerprint(folder)
    model = load_contextual(folder, device)
    # Not a corpus that is saved with it, and no warning that there is none.
    model.set_corpus(model.no_context())
    found: SizeScores = {size: {task: [] for task in data} for size in sizes}
    wanted = [(draw, size) for draw in range(draws) for size in sizes if size or not draw]
    for number, (draw, size) in enumerate(wanted, start=1):
        seed = CONTEXT_SEED + draw
        logger.info(
            "measuring with %d context documents, random draw %d (measurement %d of %d)",
            size,
            draw + 1,
            number,
            len(wanted),
        )
        meta = model_meta(
            name,
            f"{weights}-{decided(made, prompts, {'context': [size, seed]})[:8]}",
            embed_dim=model.dimensions[0],
            similarity_fn_name="cosine",
        )
        lengths = lengths_read(model.config)
        spec = loaded_spec(model, meta, prompts, lengths, seed=seed, num_context=size)
        for task, value in scores_of(spec, factories, results_folder, device).items():
            found[size][task].append(value)
    return found


def contextual_folder(reference: str) -> tuple[Path, int]:
    """Return a contextual model's folder and its number of context documents, without reading
    weights.

    Raises:
        AssetError, ArtifactError: the reference leads to no model, or to one without context.
    """
    folder = resolve_model(reference)
    config = check_loadable(folder)
    if config.kind != "cde":
        raise ArtifactError(
            f"{reference!r} is a model of kind {config.kind!r}, which has no context; use a CDE "
            "model"
        )
    return folder, config.context_places


def load_contextual(folder: Path, device: str) -> CDE:
    """Load the model in `contextual_folder`, on the device."""
    model = load_model(folder, device=device)
    assert isinstance(model, CDE)
    return model


def tasks_of(run: Run, names: Sequence[str]) -> list[OwnTask]:
    """Select the run's own retrieval tasks with these names, in order.

    Raises:
        ConfigError: the run has no such set.
    """
    sets = [
        own
        for own in run.evaluation.own_sets
        if isinstance(own, RetrievalSet) and not own.languages
    ]
    if not sets:
        raise ConfigError(
            "evaluation.own_sets has no retrieval set, so there is nothing to score the model "
            "on; set evaluation.benchmarks=[wikipedia]"
        )
    known = [own.name for own in sets]
    for name in names:
        if name not in known:
            raise ConfigError(f"no retrieval task {name!r}; {nearest(name, known)}")
    return [OwnTask(own) for own in sets if own.name in names]


def documents_of(task: OwnTask) -> list[str]:
    """Return the documents of a retrieval task, as a model reads them.

    Raises:
        DataError: there is no such set.
    """
    made = task.load()
    made.load_data()
    (part,) = made.dataset["default"].values()
    return [f"{row['title']} {row['text']}".strip() for row in part["corpus"]]


def check_sizes(sizes: Sequence[int], places: int, tasks: Sequence[OwnTask]) -> None:
    """Check that the model supports each size and that every task has enough documents.

    Raises:
        ConfigError: it has not; says how many there are.
    """
    largest = max(sizes)
    if largest > places:
        raise ConfigError(
            f"{largest} context documents were requested, but the model takes at most {places} "
            "(model.num_context); request fewer"
        )
    for task in tasks:
        there = len(random_documents(documents_of(task), largest, seed=0))
        if there < largest:
            raise ConfigError(
                f"{largest} context documents were requested, but the task {task.name} has only "
                f"{there}; request fewer or use a larger set"
            )
