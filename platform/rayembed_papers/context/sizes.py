"""A contextual model's scores with fewer context documents than it takes (Figure 16).

"Because the model includes an optional null token, we can supply any number of contextual inputs"
(arXiv 2410.02525, section 10.5): the null token stands where documents are missing.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.loaded_spec import loaded_spec
from rayembed.evaluation.made_scores import scores_of
from rayembed.evaluation.mteb_model import model_meta
from rayembed.evaluation.run_scores import decided, prompts_for
from rayembed.evaluation.wikipedia_factory import wikipedia_factories
from rayembed.evaluation.wikipedia_tasks import RETRIEVAL_TASKS
from rayembed.models.cde import CDE
from rayembed.models.corpus import random_documents
from rayembed.models.fingerprints import weights_fingerprint
from rayembed.models.load import check_loadable, load_model

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
    """Scores of a saved model with so many documents of each task's corpus as context.

    The documents of a draw are the first ones of a larger size's draw by the same seed; the first
    draw is that of the run's own evaluation. Without documents there is one draw. Results are kept
    in the folder and not taken again.

    Args:
        run: its evaluation and held-out titles say what the tasks are.
        sizes: at most as many as the model takes.

    Raises:
        AssetError, ArtifactError: the reference leads to no model, or to one without context.
        ConfigError: a size, a task that cannot be, or a run that does not score the sample.
    """
    folder, places = contextual_folder(str(reference))
    made = tasks_of(run, tasks)
    check_sizes(sizes, places, made)
    prompts = prompts_for(folder, run)
    data = {task.metadata.name: task.metadata.dataset["revision"] for task in made}
    weights = weights_fingerprint(folder)
    model = load_contextual(folder, device)
    # Not a corpus that is saved with it, and no warning that there is none.
    model.set_corpus(model.no_context())
    found: SizeScores = {size: {task: [] for task in data} for size in sizes}
    wanted = [(draw, size) for draw in range(draws) for size in sizes if size or not draw]
    for number, (draw, size) in enumerate(wanted, start=1):
        seed = run.seed + draw
        logger.info("%d context documents, draw %d (%d of %d)", size, draw + 1, number, len(wanted))
        meta = model_meta(
            name,
            f"{weights}-{decided(made, prompts, {'context': [size, seed]})[:8]}",
            embed_dim=model.dimensions[0],
            similarity_fn_name="cosine",
        )
        spec = loaded_spec(model, meta, prompts, seed=seed, num_context=size)
        for task, value in scores_of(spec, made, results_folder, device).items():
            found[size][task].append(value)
    return found


def contextual_folder(reference: str) -> tuple[Path, int]:
    """The folder of a saved model that takes context, and how many documents; no weights are read.

    Raises:
        AssetError, ArtifactError: the reference leads to no model, or to one without context.
    """
    folder = resolve_model(reference)
    config = check_loadable(folder)
    if config.kind != "cde":
        raise ArtifactError(
            f"{reference!r} is a model of kind {config.kind!r}, which takes no context; CDE does"
        )
    return folder, config.num_context


def load_contextual(folder: Path, device: str) -> CDE:
    """The model of `contextual_folder`, on the device."""
    model = load_model(folder).to(device)
    assert isinstance(model, CDE)
    return model


def tasks_of(run: Run, names: Sequence[str]) -> list[Any]:
    """Fresh retrieval tasks of the sample by these names, in the order of tables.

    Raises:
        ConfigError: the run does not score the sample, or no such a retrieval task.
        DataError: the held-out articles are too few for a task.
    """
    if not run.evaluation.scores_wikipedia:
        raise ConfigError(
            "evaluation.benchmarks has no wikipedia: there is nothing to score the model on; set "
            "evaluation.benchmarks=[wikipedia]"
        )
    for name in names:
        if name not in RETRIEVAL_TASKS:
            raise ConfigError(f"no retrieval task {name!r}; {nearest(name, RETRIEVAL_TASKS)}")
    return [factory.load() for factory in wikipedia_factories(run.wikipedia, names)]


def check_sizes(sizes: Sequence[int], places: int, tasks: Sequence[Any]) -> None:
    """Return when the model has places, and every task has documents, for each of the sizes.

    Raises:
        ConfigError: it has not; says how many there are.
    """
    largest = max(sizes)
    if largest > places:
        raise ConfigError(
            f"{largest} context documents are more than the {places} that the model takes "
            "(model.num_context); ask for fewer"
        )
    for task in tasks:
        documents = task.sample.documents.values()
        there = len(random_documents(documents, largest, seed=0))
        if there < largest:
            raise ConfigError(
                f"{largest} context documents are more than the {there} of the task "
                f"{task.metadata.name}; ask for fewer or raise "
                "evaluation.wikipedia.num_documents"
            )
