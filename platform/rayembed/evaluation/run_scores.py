"""Evaluation settings and prompts for the models of a training run.

Whoever takes scores for a run (after a stage, in validation, in an analysis) asks here, so that a
model has the same scores wherever they are taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.config.document import fingerprint
from rayembed.config.evaluation import BM25, ModelUnderTest, Prompts
from rayembed.config.held_out import held_out_set
from rayembed.config.run import Run
from rayembed.config.table import load
from rayembed.config.types import Precision
from rayembed.errors import ConfigError
from rayembed.evaluation.bm25 import Bm25, bm25_meta, bm25_revision
from rayembed.evaluation.model_spec import LOADERS, SCORES, ModelSpec
from rayembed.evaluation.prompts import (
    ModelPrompts,
    check_instructions,
    folder_prompts,
    unsaved_prompts,
)
from rayembed.evaluation.prompts_table import literal_prompts
from rayembed.evaluation.rayembed_spec import RayembedSpec, rayembed_spec
from rayembed.evaluation.training_data import TrainingData
from rayembed.machine import hardware
from rayembed.machine.device import placed_here
from rayembed.models.loading.load import check_loadable
from rayembed.models.loading.saved_folder import SETTINGS_FILE
from rayembed.models.versions import VECTORS


def run_model(
    run: Run,
    reference: str,
    *,
    name: str,
    dimensions: int | None = None,
    precision: Precision = "float32",
    without_context: bool = False,
    training: TrainingData | None = None,
    on: hardware.Precision | str | None = None,
) -> ModelSpec | Bm25:
    """Make the spec of a run's model or of a baseline, with number type, lengths and context as in
    `rayembed evaluate`.

    Args:
        reference: `bm25`, or an asset reference of a saved model.
        name: of the model in results.
        dimensions: so many first values of each vector are kept (Matryoshka); None: all.
        precision: number type of the vectors.
        without_context: whether a contextual model embeds behind its null token.
        training: what it was trained on; None: what its folder says.
        on: what will compute, as in `hardware.settled`; None: this machine.

    Raises:
        AssetError, ArtifactError: the reference leads to no model.
        ConfigError: an instruction for a task that is not known.
    """
    if reference == BM25:
        return Bm25(bm25_meta(name, bm25_revision()))
    on = on or ("cuda" if placed_here(run.placement).on_gpu else "cpu")
    settings = ModelUnderTest(
        reference=reference,
        name=name,
        dimensions=dimensions,
        precision=precision,
        context="none" if without_context else "corpus",
        prompts=_given(resolve_model(reference), run),
    )
    spec = make_spec(settings, own_tasks=own_names(run), on=on)
    return replace(spec, training=training) if isinstance(spec, RayembedSpec) and training else spec


def own_names(run: Run) -> tuple[str, ...]:
    """Names of the run's own sets, including validation sets and held-out sets."""
    names = [own.name for own in run.evaluation.own_sets]
    names += [held_out_set(dataset.name) for dataset in run.held_out_datasets]
    return tuple(dict.fromkeys((*names, *run.validation_names)))


def prompts_for(folder: Path, run: Run) -> ModelPrompts:
    """Prompts of a run's saved model, the same as in `rayembed evaluate`."""
    return ModelPrompts(_given(folder, run), folder_prompts(folder, check_loadable(folder)))


def run_prompts(run: Run, settings: Prompts | None = None) -> ModelPrompts:
    """Prompts of a run's model that is not saved yet."""
    told = unsaved_prompts(run.model, run.instructions, run.default_instructions())
    return ModelPrompts(settings or Prompts(), told)


def decided(tasks: Sequence[Any], prompts: ModelPrompts, *others: object) -> str:
    """Fingerprint of everything apart from weights that scores depend on: data, prompts, and the
    constants `VECTORS` and `SCORES`.

    Args:
        others: plain values that decide it, too.
    """
    data = {task.metadata.name: task.metadata.dataset["revision"] for task in tasks}
    return fingerprint([data, literal_prompts(prompts, tasks), VECTORS, SCORES, *others])


def _given(folder: Path, run: Run) -> Prompts:
    """Instructions of the run that the model's folder lacks; empty for models of others that take
    no instructions.

    A model of the run was saved with all of them, so that whoever scores it without the run finds
    the same.
    """
    config = check_loadable(folder)
    takes_instructions = config.template is not None and not config.prefixes
    if not (folder / SETTINGS_FILE).is_file() and not takes_instructions:
        return Prompts()
    said = folder_prompts(folder, config)
    told = run.evaluation.instructions.items()
    new = {name: text for name, text in told if said.named.get(name) != config.prompt(text)}
    return Prompts(instructions=new)


def make_spec(
    settings: ModelUnderTest,
    *,
    tracking_uri: str | None = None,
    own_tasks: Iterable[str] = (),
    on: hardware.Precision | str | None = None,
) -> ModelSpec:
    """Make the spec of the configured model, without loading its weights.

    Args:
        own_tasks: names of tasks that mteb does not have and instructions may be given for.
        tracking_uri: MLflow's address, for `models:/…`; None: `MLFLOW_TRACKING_URI`.
        on: what will compute, for the number type `auto`; see `hardware.settled`.

    Raises:
        ArtifactError: an incomplete folder, or a model that is not supported.
        AssetError: the reference leads nowhere.
        ConfigError: settings that do not fit the model; instructions for unknown tasks; `bm25`,
            which embeds nothing.
        TrackingError: MLflow is away.
    """
    check_instructions(settings.prompts, own_tasks)
    if settings.reference == BM25:
        raise ConfigError(
            "bm25 has no vectors, so it cannot be loaded as an embedder; use "
            "rayembed.evaluation.bm25.Bm25, which searches by itself"
        )
    for loader in LOADERS.members().values():
        if loader.takes(settings.reference):
            more = {"tracking_uri": tracking_uri} if loader.names_others else {}
            spec: ModelSpec = load(loader.spec)(settings, on=on, **more)
            return spec
    return rayembed_spec(settings, tracking_uri=tracking_uri, on=on)
