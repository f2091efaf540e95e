"""Scores of a model in training, on small tasks that have no part in the scores after training."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mteb

from rayembed.assets.resolver import resolve
from rayembed.assets.storage import join
from rayembed.config.document import fingerprint
from rayembed.config.evaluation import Prompts
from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.config.validation import (
    BeirValidation,
    MtebValidation,
    ValidationConfig,
    WikipediaValidation,
)
from rayembed.data.sources.wikipedia import read_articles, validation_titles
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation.evaluate import as_mteb_model, run_prompts, wikipedia_source
from rayembed.evaluation.mteb_model import model_meta
from rayembed.evaluation.own_set import OwnSet
from rayembed.evaluation.prompts import ModelPrompts
from rayembed.evaluation.wikipedia_tasks import TASK_NAMES, wikipedia_tasks
from rayembed.models.contract import EmbeddingModel

logger = logging.getLogger(__name__)

ALLOWED_BENCHMARKS = ("NanoBEIR", "NanoBEIR-multilingual")
"""Benchmarks of mteb whose tasks may choose weights: no other is small, and others are reported."""


MAX_DOCUMENTS = 200_000
"""More would make every score of a training run as long as an evaluation of its own."""


def validation_tasks(run: Run) -> list[Any]:
    """Fresh mteb tasks of the run's validation. Data of the hub are not loaded yet.

    Raises:
        ConfigError: an unknown task, a task that models are compared by, or no source.
        DataError: the user's files are not in order, or held-out articles are too few.
    """
    data = _settings(run).data
    match data:
        case WikipediaValidation():
            return _wikipedia(run, data)
        case BeirValidation(path=path):
            relative = run.data.root and "://" not in path and not Path(path).is_absolute()
            return [_own_task(data, join(run.data.root, path) if relative else path)]
        case MtebValidation(tasks=names):
            return [_nano_task(name) for name in names]


def check_validation(run: Run) -> None:
    """Return when the run's validation has its tasks with their data, those of the hub fetched.

    Raises:
        ConfigError: as `validation_tasks`.
        DataError: as it, or the hub does not give a task's data.
    """
    import httpx

    for task in validation_tasks(run):
        name = task.metadata.name
        try:
            task.load_data()
        except (OSError, ValueError, KeyError, httpx.HTTPError) as error:
            raise DataError(
                f"mteb cannot load its task {name!r} ({type(error).__name__}): {error}. It comes "
                "from the Hugging Face hub; without one set evaluation.validation.data.kind=beir "
                "with files of your own, or evaluation.validation=null"
            ) from error


def data_revision(tasks: Sequence[Any]) -> str:
    """Twelve hexadecimal digits of the tasks' names and data."""
    return fingerprint({task.metadata.name: task.metadata.dataset["revision"] for task in tasks})


def validate(model: EmbeddingModel, run: Run) -> dict[str, float]:
    """Main score of each task of the run's validation, by task name; nothing is kept on disk.

    A contextual model has documents of each task's corpus as context, as in the scores after
    training.
    """
    meta = model_meta(
        f"{run.name}-validation",
        "in-training",
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        embed_dim=model.dimensions[0],
        similarity_fn_name="cosine",
    )

    scored = as_mteb_model(model, meta, validation_prompts(run), seed=run.seed)
    scores: dict[str, float] = {}
    for task in validation_tasks(run):
        result = mteb.evaluate(
            scored,
            task,
            cache=None,
            co2_tracker=False,
            encode_kwargs={"batch_size": 256, "show_progress_bar": False},
            overwrite_strategy="always",
            show_progress_bar=False,
        )
        scores[task.metadata.name] = float(result.task_results[0].get_score())
    return scores


def validation_prompts(run: Run) -> ModelPrompts:
    """What stands before the texts of the run's validation: as in the scores after training."""
    given: dict[str, str] = {}
    match _settings(run).data:
        case MtebValidation(instructions=instructions):
            given = instructions
        case BeirValidation(name=name, instruction=instruction) if instruction:
            given = {name: instruction}
    return run_prompts(run, Prompts(instructions=given))


def deciding_score(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Mean of the tasks' scores; tasks without a weight weigh 1.

    Summed exactly and rounded once, so that it does not depend on the order of the tasks.
    """
    shares = {task: weights.get(task, 1.0) for task in scores}
    total = math.fsum(shares[task] * score for task, score in scores.items())
    return total / math.fsum(shares.values())


def _settings(run: Run) -> ValidationConfig:
    assert run.evaluation.validation is not None, "the run has no validation"
    return run.evaluation.validation


def _wikipedia(run: Run, data: WikipediaValidation) -> list[Any]:
    for name in data.tasks:
        if name not in TASK_NAMES:
            raise ConfigError(
                f"evaluation.validation.data.tasks: no task {name!r}; {nearest(name, TASK_NAMES)}"
            )
    articles = read_articles(resolve(wikipedia_source(run)))
    held_out = run.data.held_out.num_titles
    titles = validation_titles(articles, held_out, data.num_titles, run.seed)
    return wikipedia_tasks(
        [article for article in articles if article.title in titles],
        num_documents=data.num_titles,
        num_queries=data.num_queries,
        max_length=run.evaluation.max_length,
        seed=run.seed,
        names=data.tasks,
    )


def _own_task(data: BeirValidation, path: str) -> Any:
    own = OwnSet(data.name, path, data.split, data.instruction)
    if own.about.documents > MAX_DOCUMENTS:
        raise DataError(
            f"the set at {path!r} has {own.about.documents:,} documents, more than "
            f"{MAX_DOCUMENTS:,}: validation needs a small set that is scored in a minute; take a "
            "sample of the corpus with all relevant documents"
        )
    return own.load()


def _nano_task(name: str) -> Any:
    allowed = {
        task.metadata.name
        for benchmark in ALLOWED_BENCHMARKS
        for task in mteb.get_benchmark(benchmark).tasks
    }
    if name not in allowed:
        raise ConfigError(
            f"evaluation.validation.data.tasks: {name!r} is no task of {ALLOWED_BENCHMARKS[0]}, "
            "and what models are compared by must not choose among them; "
            f"{nearest(name, allowed)} For your own queries set evaluation.validation.data.kind="
            "beir"
        )
    return mteb.get_task(name)
