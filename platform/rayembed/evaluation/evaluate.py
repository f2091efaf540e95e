"""Scores of one model on the held-out tasks, through mteb and in mteb's result format.

Results lie in `<results folder>/results/<model>/<revision>/<task>.json`. mteb takes a complete
result from there whatever data it was made of, so the revision names three things: the weights,
and after a dash the data of the tasks, what stands before their texts and the software. Same
revision, same numbers: a second call reads them back and embeds nothing. Revisions of cut vectors
begin with `first256-`, those of another context than the model's own with `context0-`: scores of a
model as it is are found by how they begin, with the weights.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import mteb
from filelock import FileLock
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.languages.check_language_code import check_language_code
from mteb.models import ModelMeta

from rayembed.assets.resolver import resolve, resolve_model
from rayembed.config.backbone import Dtype
from rayembed.config.document import fingerprint
from rayembed.config.evaluation import Prompts
from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.config.sources import WikipediaSource
from rayembed.data.sources.wikipedia import (
    Article,
    held_out_titles,
    read_articles,
    validation_titles,
)
from rayembed.errors import ConfigError
from rayembed.evaluation.bm25 import Bm25, bm25_meta
from rayembed.evaluation.code_version import code_version
from rayembed.evaluation.folder_prompts import folder_prompts, unsaved_prompts
from rayembed.evaluation.loaded_spec import contextual_model
from rayembed.evaluation.mteb_model import Embed, MtebEncoder, model_meta
from rayembed.evaluation.prompts import ModelPrompts
from rayembed.evaluation.prompts_table import literal_prompts
from rayembed.evaluation.rayembed_spec import cut, with_literal_prompts
from rayembed.evaluation.wikipedia_tasks import CROSS_LINGUAL, TASK_NAMES, wikipedia_tasks
from rayembed.hardware import settled, wide_enough
from rayembed.models.cde import CDE
from rayembed.models.contract import EmbeddingModel, Role
from rayembed.models.encoding import encode
from rayembed.models.export import SETTINGS_FILE
from rayembed.models.fingerprints import weights_fingerprint
from rayembed.models.json_file import read_json
from rayembed.models.load import check_loadable, load_model

logger = logging.getLogger(__name__)

BM25 = "bm25"
"""Name of the baseline among `evaluation.baselines` that is no asset reference."""


def evaluate(
    model: EmbeddingModel | Bm25,
    run: Run,
    *,
    name: str,
    revision: str,
    results_folder: str | Path,
    prompts: ModelPrompts | None = None,
    dimension: int | None = None,
    num_context: int | None = None,
) -> dict[str, float]:
    """Main score of each task of the run's suite, by task name; BM25 has retrieval tasks only.

    Args:
        name: names the model in results, with or without an organisation before a slash.
        revision: tells the weights from other weights of that name, as a fingerprint does.
        results_folder: local folder; what is already scored there is read and not run again.
        prompts: of the model; None: as a model of the run has them.
        dimension: so many first values of each vector are kept (Matryoshka); None: all.
        num_context: documents of a contextual model's context; None: as many as it takes.

    Raises:
        ConfigError: the settings of the evaluation contradict each other or the data.
        DataError: the held-out articles are too few for a task.
    """
    tasks = suite_tasks(run)
    if not tasks:
        return {}
    if isinstance(model, Bm25):
        tasks = _retrieval_only(tasks)
        meta = bm25_meta(name, _full_revision(revision, tasks))
        scored: Any = Bm25(meta)
    else:
        if prompts is None:
            prompts = run_prompts(run)
        meta = model_meta(
            name,
            _full_revision(revision, tasks, prompts, dimension, num_context),
            n_parameters=sum(parameter.numel() for parameter in model.parameters()),
            embed_dim=dimension or model.dimensions[0],
            similarity_fn_name="cosine",
            use_instructions=prompts.folder.template is not None,
        )
        scored = as_mteb_model(
            model,
            meta,
            prompts,
            seed=run.seed,
            dimension=dimension,
            num_context=num_context,
        )
    return run_tasks(scored, meta, tasks, results_folder)


def evaluate_reference(
    reference: str | Path,
    run: Run,
    *,
    name: str,
    results_folder: str | Path,
    device: str = "cpu",
    dimension: int | None = None,
    num_context: int | None = None,
) -> dict[str, float]:
    """As `evaluate`, of `bm25`, a saved model's folder or any asset reference of a model.

    Without context documents a contextual model embeds behind the null token.

    The model is loaded only if a score is missing. What stands before texts is what `prompts_for`
    gives.

    Raises:
        AssetError: the reference leads to no model.
    """
    if str(reference) == BM25:
        return evaluate(
            Bm25(), run, name=name, revision=Bm25.revision, results_folder=results_folder
        )
    folder = resolve_model(str(reference))
    revision = weights_fingerprint(folder)
    tasks = suite_tasks(run)
    prompts = prompts_for(folder, run)
    full = _full_revision(revision, tasks, prompts, dimension, num_context)
    known = stored_scores(results_folder, model_meta(name, full), tasks)
    if len(known) == len(tasks):
        logger.info("%s: all %d scores are in %s", name, len(tasks), results_folder)
        return known
    model = load_model(folder, dtype=run_dtype(run, device)).to(device)
    if isinstance(model, CDE) and num_context == 0:
        model.set_corpus(model.no_context())  # whatever corpus is saved with it
    return evaluate(
        model,
        run,
        name=name,
        revision=revision,
        results_folder=results_folder,
        prompts=prompts,
        dimension=dimension,
        num_context=num_context,
    )


def run_dtype(run: Run, device: str) -> Dtype:
    """The number type in which all models of a run are scored: the run's own, widened to float32
    where the device emulates it.
    """
    return wide_enough(settled(run.model.backbone.dtype, device), device)


def scored_revision(folder: Path, run: Run) -> str:
    """The revision under which `evaluate_reference` keeps the scores of a model's folder."""
    return _full_revision(weights_fingerprint(folder), suite_tasks(run), prompts_for(folder, run))


def suite_tasks(run: Run) -> list[Any]:
    """Fresh mteb tasks of the run's suite; none for the suite `none`.

    Raises:
        ConfigError: an unknown task name, no source, more documents than held-out articles.
        DataError: the held-out articles are too few for a task.
    """
    settings = run.evaluation
    if settings.suite == "none":
        return []
    for task in settings.instructions:
        if task not in (*TASK_NAMES, CROSS_LINGUAL):
            raise ConfigError(
                f"evaluation.instructions: no task {task!r}; "
                f"{nearest(task, (*TASK_NAMES, CROSS_LINGUAL))}"
            )
    return wikipedia_tasks(
        held_out_articles(run),
        num_documents=settings.num_documents,
        num_queries=settings.num_queries,
        max_length=settings.max_length,
        seed=run.seed,
        translations=_translations(run),
    )


def _translations(run: Run) -> dict[str, list[Article]]:
    """The sample in other languages, by mteb's code of the language."""
    found = {}
    for code, reference in run.evaluation.translations.items():
        try:
            check_language_code(code)
        except ValueError as error:
            raise ConfigError(
                f"evaluation.translations: {code!r} is no language of mteb's, such as 'fra-Latn': "
                f"{error}"
            ) from None
        found[code] = read_articles(resolve(_under_root(run, reference)))
    return found


def held_out_articles(run: Run) -> list[Article]:
    """The articles that no training row and no validation of the run touches.

    Raises:
        ConfigError: no source is named, or it holds fewer held-out titles than documents asked.
    """
    articles, held_out = all_articles(run), run.data.held_out.num_titles
    titles = held_out_titles(articles, held_out, run.seed)
    titles -= validation_titles(articles, held_out, run.evaluation.num_validation_titles, run.seed)
    kept = [article for article in articles if article.title in titles]
    if len(kept) < run.evaluation.num_documents:
        raise ConfigError(
            f"evaluation.num_documents {run.evaluation.num_documents} exceeds the {len(kept)} "
            f"held-out articles (data.held_out.num_titles {run.data.held_out.num_titles}); "
            "hold out more or ask for fewer"
        )
    return kept


def all_articles(run: Run) -> list[Article]:
    """All articles of the run's sample, held-out ones among them.

    Raises:
        ConfigError: no source is named.
    """
    return read_articles(resolve(wikipedia_source(run)))


def prompts_for(folder: Path, run: Run) -> ModelPrompts:
    """What stands before texts for the model of a folder, as `jobs/evaluate_model.py` has it.

    The run's instructions go before all else for a model that knows such; of others' encoders the
    folder alone counts.
    """
    given = run.evaluation.instructions if _knows_instructions(folder) else {}
    found = folder_prompts(folder, check_loadable(folder))
    return ModelPrompts(Prompts(instructions=given), found)


def run_prompts(run: Run, settings: Prompts | None = None) -> ModelPrompts:
    """What stands before texts for a model of the run that lies in no folder yet."""
    return ModelPrompts(settings or Prompts(), unsaved_prompts(run.model, run.instructions))


def run_tasks(
    model: Any, meta: ModelMeta, tasks: Sequence[Any], results_folder: str | Path
) -> dict[str, float]:
    """Main score of each mteb task by name, of an mteb model; results are kept in the folder.

    One process at a time writes the results of a model: the others wait.
    """
    folder = Path(results_folder)
    cache = mteb.ResultCache(folder)
    place = cache.get_task_result_path(tasks[0].metadata.name, meta).parent
    place.mkdir(parents=True, exist_ok=True)
    scores: dict[str, float] = {}
    with FileLock(place / ".lock"), _no_progress_bars():
        scores.update(stored_scores(folder, meta, tasks))
        for number, task in enumerate(tasks, start=1):
            name = task.metadata.name
            if name in scores:
                logger.info("%s: %s is scored already", meta.name, name)
                continue
            started = time.monotonic()
            mteb.evaluate(
                model,
                task,
                cache=cache,
                co2_tracker=False,
                encode_kwargs={"batch_size": 256, "show_progress_bar": False},
                overwrite_strategy="always",
                show_progress_bar=False,
            )
            # As written down, which is rounded: a second call must give the same numbers.
            scores.update(stored_scores(folder, meta, [task]))
            logger.info(
                "%s: %s %s %.4f, %.1f s (%d of %d)",
                meta.name,
                name,
                task.metadata.main_score,
                scores[name],
                time.monotonic() - started,
                number,
                len(tasks),
            )
    return {task.metadata.name: scores[task.metadata.name] for task in tasks}


def stored_scores(
    results_folder: str | Path, meta: ModelMeta, tasks: Sequence[Any]
) -> dict[str, float]:
    """Main scores that the folder already holds for this model revision and these tasks' data.

    A result that was half written by a killed process, or made of other data, counts as missing.
    """
    cache = mteb.ResultCache(Path(results_folder))
    scores: dict[str, float] = {}
    for task in tasks:
        path = cache.get_task_result_path(task.metadata.name, meta)
        if not path.exists():
            continue
        try:
            result = mteb.TaskResult.from_disk(path)
        except (ValueError, KeyError) as error:
            logger.warning("%s cannot be read and is made again: %s", path, error)
            continue
        complete = set(task.eval_splits) <= set(result.scores)
        if complete and result.dataset_revision == task.metadata.dataset["revision"]:
            scores[task.metadata.name] = float(result.get_score())
    return scores


def _knows_instructions(folder: Path) -> bool:
    """Whether a model of this house or a published NV-Embed lies there, not any encoder."""
    if (folder / SETTINGS_FILE).is_file():
        return True
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("model_type") == "nvembed"


def wikipedia_source(run: Run) -> str:
    """Asset reference of the Wikipedia sample that the run is scored on.

    Raises:
        ConfigError: none is named.
    """
    reference = run.evaluation.source
    if reference is None:
        named = [d.source.path for d in run.data.datasets if isinstance(d.source, WikipediaSource)]
        if not named:
            raise ConfigError(
                "evaluation.suite is wikipedia, but no data set has a Wikipedia source; set "
                "evaluation.source to the sample's reference or evaluation.suite to none"
            )
        reference = named[0]
    return _under_root(run, reference)


def _under_root(run: Run, reference: str) -> str:
    if run.data.root and "://" not in reference and not Path(reference).is_absolute():
        return f"{run.data.root.rstrip('/')}/{reference}"
    return reference


def _full_revision(
    revision: str,
    tasks: Sequence[Any],
    prompts: ModelPrompts | None = None,
    dimension: int | None = None,
    num_context: int | None = None,
) -> str:
    whole = f"{revision}-{decided(tasks, prompts)[:8]}"
    if num_context is not None:
        whole = f"context{num_context}-{whole}"
    return whole if dimension is None else f"first{dimension}-{whole}"


def decided(tasks: Sequence[Any], prompts: ModelPrompts | None, *others: object) -> str:
    """Names what a score comes from besides weights: data, prompts, software.

    Args:
        others: plain values that decide it, too.
    """
    data = {task.metadata.name: task.metadata.dataset["revision"] for task in tasks}
    before = {} if prompts is None else literal_prompts(prompts, tasks)
    return fingerprint([data, before, code_version().scores, *others])


def _retrieval_only(tasks: Sequence[Any]) -> list[Any]:
    return [task for task in tasks if isinstance(task, AbsTaskRetrieval)]


def as_mteb_model(
    model: EmbeddingModel,
    meta: ModelMeta,
    prompts: ModelPrompts,
    *,
    seed: int,
    dimension: int | None = None,
    num_context: int | None = None,
) -> Any:
    """The model as mteb scores it; a contextual one in the context of each task's corpus.

    Args:
        seed: of the draw of context documents.
        dimension: so many first values of each vector are kept; None: all.
        num_context: documents of a contextual model's context; None: as many as it takes.
    """
    if model.uses_context:
        return contextual_model(
            model,
            meta,
            prompts,
            seed=seed,
            num_context=num_context,
            dimension=dimension,
        )
    return MtebEncoder(encoder_of(model, dimension), meta, prompts=prompts)


def encoder_of(model: EmbeddingModel, dimension: int | None = None) -> Embed:
    """What embeds texts with the model as the tasks ask; empty texts by their special tokens.

    An instruction is what `ModelPrompts.instruction` gives.

    Args:
        dimension: so many first values of each vector are kept, at unit length; None: all.
    """
    literal = with_literal_prompts(model)

    def embed(texts: Sequence[str], role: Role, instruction: str) -> Any:
        vectors = encode(literal, texts, role=role, instruction=instruction, allow_empty=True)
        return cut(vectors, dimension or model.dimensions[0])

    return embed


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without the bar that mteb draws for each corpus it maps, which clutters a job's log."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
