"""Settings of the small measurement: a base model, its compression, and recovery training."""

from rayembed.api.calls import assignments_of
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.recipes.catalogue import get_recipe
from rayembed.recipes.sample import RETRIEVAL_TASKS, Wikipedia, own_sets
from rayembed_extras.compression.run_settings import (
    CalibrationConfig,
    CompressionPlacement,
    CompressionRun,
)
from rayembed_extras.wikipedia_sample.references import sizes_of

NAME = "nvembed-tables6-8-quickstart"

LENGTH = 32
"""Maximum tokens of a text."""

WEIGHT = 1.0
"""Weight of the hidden states' errors; the paper does not state it."""


def base_run(seed: int, *, layers: int, steps: int, storage: str) -> Run:
    """Return the run that trains the base model, the first layers of all-MiniLM-L6-v2, on the
    sample's pairs.
    """
    sizes = sizes_of(Wikipedia().scores(documents=1000, queries=500, max_length=LENGTH))
    assert sizes is not None
    sets = [one.model_dump(mode="json") for one in own_sets(sizes, RETRIEVAL_TASKS)]
    settings = {
        "name": f"{NAME}-base-{seed}",
        "seed": seed,
        "model.backbone.num_layers": layers,
        "model.query_max_length": LENGTH,
        "model.document_max_length": LENGTH,
        "stages.finetune.steps": steps,
        "stages.finetune.batch.global_pairs": 32,
        "stages.finetune.optimizer.learning_rate": 2e-4,
        "evaluation.own_sets": sets,
        "evaluation.baselines": [],
        "placement.storage_path": storage,
        "placement.registered_model": NAME,
    }
    return override(get_recipe("biencoder-quickstart"), assignments_of(settings))


def recovery_run(base: Run, pruned: str, label: str, *, steps: int, teacher: str | None) -> Run:
    """Return the run that trains a pruned model and keeps its zeros, on other batches of the same
    rows.

    Args:
        pruned: the model's folder.
        label: of the pruned model.
        teacher: folder of the uncompressed model, whose hidden states are learnt beside the labels
            (the paper's A.2); None: labels alone.
    """
    settings = {
        "name": f"{base.name}-{label}-{'labels' if teacher is None else 'distilled'}",
        "seed": base.seed + 1000,
        "model.backbone.path": pruned,
        "model.backbone.num_layers": None,
        "model.keep_zeros": True,
        "stages.finetune.steps": steps,
        "evaluation.before_training": False,
    }
    if teacher is not None:
        settings["stages.finetune.hidden_states"] = {"teacher": teacher, "weight": WEIGHT}
    return override(base, assignments_of(settings))


def compression_run(
    base: Run, model: str, ways: list[dict[str, str]], label: str
) -> CompressionRun:
    """Return the settings that compress a model by several methods and score the variants as the
    runs are scored.

    Args:
        model: its folder.
        label: of the model, in the name of the folder of its variants.
    """
    placement = CompressionPlacement(
        storage_path=base.placement.storage_path, experiment=base.placement.experiment
    )
    values = {
        **base.scores.model_dump(mode="json"),
        "name": f"{base.name}-{label}",
        "model": ModelUnderTest(reference=model).model_dump(mode="json"),
        "ways": ways,
        "calibration": CalibrationConfig(seed=base.seed).model_dump(mode="json"),
        "speed": None,
        "placement": placement.model_dump(mode="json"),
    }
    return parse(CompressionRun, values)
