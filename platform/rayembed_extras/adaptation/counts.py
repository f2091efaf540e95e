"""Estimate parameters, memory and computation of an adaptation before it starts."""

import math

from rayembed_extras.adaptation.encoder import empty_masked_language_model
from rayembed_extras.adaptation.settings import Adaptation, MaskingConfig
from rayembed_extras.estimates.requirements import (
    ModelSize,
    expected_precision,
    known_settings,
    looked_up,
    worker_memory,
)
from rayembed_extras.estimates.time import FILLED, CountedKind, Work


def adaptation_needs(run: Adaptation) -> dict[str, str]:
    """Return the rows of a dry run's table with the parameter count and a worker's memory.

    Raises:
        ConfigError, ArtifactError: the model cannot be built as configured.
    """
    size = adaptation_size(run)
    if size is None:
        return {"parameters": "not known without fetching the model"}
    dtype, placement = expected_precision(run).dtype, run.placement
    memory = worker_memory(size, dtype, placement, run.training.optimizer.state_bytes)
    return {
        "parameters": f"{size.total:,}, all trained, the head's among them",
        "memory a worker": (
            f"{memory.total / 2**30:.2f} GiB and activations ({dtype}, ZeRO {placement.zero_stage})"
        ),
    }


def adaptation_size(run: Adaptation) -> ModelSize | None:
    """Count the parameters, including the prediction head; None if only the hub has the model's
    config.json.
    """
    path = run.model.backbone.path
    settings = known_settings(path, "model.backbone.path")
    if settings is None:
        return None
    model = empty_masked_language_model(settings, run.model, path)
    total = sum(p.numel() for p in model.parameters())
    return ModelSize(total=total, trainable=total)


def adaptation_work(run: Adaptation) -> Work | None:
    """Count floating-point operations: the encoder for every token, word probabilities for masked
    tokens only.
    """
    training, corpus, path = run.training, run.corpus, run.model.backbone.path
    size, settings = adaptation_size(run), known_settings(path, "model.backbone.path")
    if size is None or settings is None:
        return None
    words = looked_up(settings)

    def of_batches(number: int, masking: MaskingConfig) -> float:
        filled = 1.0 if corpus.layout == "packed" else FILLED
        tokens = number * filled * training.global_sequences * corpus.max_length
        return 2.0 * tokens * (size.total - words + masking.probability * words)

    scores, held_out = 0.0, training.held_out
    if held_out is not None:
        times = math.ceil(training.steps / (held_out.every_steps or training.steps))
        scores = of_batches(times * held_out.batches, held_out.masking)
    return Work(3.0 * of_batches(training.steps, run.masking), scores, 1)


ADAPTATION = CountedKind(Adaptation, adaptation_needs, adaptation_work)
