"""Compute a run's parameters, memory and disk from model shapes, without loading weights.

Models are built on torch's meta device from the configuration of their backbone alone. Ray is not
imported.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayembed.config.backbone import LoraConfig
from rayembed.config.document import NamedRun
from rayembed.config.model import ModelConfig
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.errors import ArtifactError, ConfigError
from rayembed.machine.device import placed_here
from rayembed.machine.hardware import Precision, auto_precision
from rayembed_extras.estimates.published_shapes import PUBLISHED

WIDTHS = {"bfloat16": 2, "float32": 4}
"""Bytes of a number by type."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model."""

    total: int
    """Pretrained parts, adapters and head, without a language-model head."""
    trainable: int
    """Parameters that the optimiser changes."""
    adapters: int = 0
    """Parameters of LoRA, which are merged into the others when a model is exported."""
    active: int | None = None
    """Parameters used for one token, for mixtures of experts; None: all."""
    experts: int = 0
    """Parameters of experts, which may be distributed over workers."""


@dataclass(frozen=True)
class Activations:
    """Activation bytes for each padded token of a micro-batch."""

    kept: float
    """Bytes of a graph."""
    kept_recomputing: float
    """Bytes of a graph whose layers are recomputed in the backward pass."""
    of_layer: float
    """Bytes of one layer of the backbone, while it is recomputed."""


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that one worker needs without activations, a lower bound of its memory."""

    weights: int
    gradients: int
    optimizer: int
    teacher: int = 0
    """Bytes of a teacher of hidden states; every worker holds all of it."""

    @property
    def total(self) -> int:
        """Bytes of weights, gradients, optimiser and teacher together."""
        return self.weights + self.gradients + self.optimizer + self.teacher


def known_settings(reference: str, setting: str) -> dict[str, Any] | None:
    """Read a model's config.json if it is on this machine or built in; None if only the hub
    has it.

    Args:
        setting: that names the model, for messages.

    Raises:
        ConfigError: a local path without a model.
    """
    import json

    published = PUBLISHED.get(reference) or PUBLISHED.get(reference.partition("@")[0])
    if published is not None:
        return published
    if "://" in reference:
        return None
    from rayembed.models.loading.saved_folder import part_folder

    path = part_folder(Path(reference).expanduser(), "backbone") / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting} {reference!r}: no model there, because its config.json cannot be read: "
            f"{error}"
        ) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{setting} {reference!r}: its config.json is not a JSON object")
    return settings


def model_size(model: ModelConfig) -> ModelSize | None:
    """Count a model's parameters; None if only the hub has the config.json of a part.

    Raises:
        ConfigError: a family that transformers lacks, heads that do not fit the hidden size,
            adapters on layers that a part does not have, texts longer than a part takes.
    """
    import torch

    from rayembed.models.architecture import architecture_of

    parts: dict[str, Any] = {}
    for name, reference in model.parts.items():
        part = empty_part(model, name, reference)
        if part is None:
            return None
        parts[name] = part
    architecture_of(model).check_lengths(model, parts)
    with torch.device("meta"):
        shapes = {name: part.config for name, part in parts.items()}
        head = architecture_of(model).build_head(model, shapes)
    sizes = [_part_size(model, name, part) for name, part in parts.items()]
    added = sum(p.numel() for p in head.parameters())
    experts, idle = _expert_sizes(parts["backbone"])
    total = sum(size.total for size in sizes) + added
    return ModelSize(
        total,
        sum(size.trainable for size in sizes) + added,
        sum(size.adapters for size in sizes),
        active=total - idle if experts else None,
        experts=experts,
    )


def flops_per_token(model: ModelConfig) -> float | None:
    """Count the floating-point operations of a forward pass for each token; None if only the hub
    has the config.json of a part.

    Two for each weight that works on a token: embeddings are looked up, idle experts rest.

    Raises:
        ConfigError: as `model_size`.
    """
    size = model_size(model)
    if size is None:
        return None
    parts = model.parts.items()
    embeddings = (known_settings(path, f"model.{name}.path") or {} for name, path in parts)
    return 2.0 * ((size.active or size.total) - sum(map(looked_up, embeddings)))


def looked_up(settings: dict[str, Any]) -> int:
    """Count the parameters of the word embeddings, which a pass looks up instead of multiplying
    with them.
    """
    width = settings.get("hidden_size") or settings.get("n_embd") or 0
    return int(width * settings.get("vocab_size", 0))


def _expert_sizes(part: Any) -> tuple[int, int]:
    """Count the expert parameters of a part, and those that a single token does not use."""
    from rayembed.models.experts import MoeMlp

    mixtures = [module for module in part.modules() if isinstance(module, MoeMlp)]
    sizes = [sum(p.numel() for p in one.experts.mlp.parameters()) for one in mixtures]
    idle = [
        size - size * one.top_k // one.experts.num_experts
        for size, one in zip(sizes, mixtures, strict=True)
    ]
    return sum(sizes), sum(idle)


def empty_part(model: ModelConfig, name: str, reference: str) -> Any | None:
    """Build a pretrained part on the meta device; None if only the hub has its config.json."""
    setting = f"model.{name}.path"
    settings = known_settings(reference, setting)
    if settings is None:
        return None
    import torch
    import transformers

    from rayembed.models.architecture import architecture_of, part_settings
    from rayembed.models.loading.backbones import cut_layers, set_dropout

    try:
        own = architecture_of(model).empty_of_settings(model, name, settings, reference)
    except ArtifactError as error:
        raise ConfigError(f"{setting}: {error}") from None
    if own is not None:
        return own
    num_layers = model.backbone.num_layers if name == "backbone" else None
    family = dict(settings)
    kind = str(family.pop("model_type", ""))
    try:
        config = transformers.AutoConfig.for_model(kind, **family)
        if num_layers is not None:
            cut_layers(config, num_layers)
        set_dropout(config, part_settings(model, name, Path(reference)))
        with torch.device("meta"):
            return transformers.AutoModel.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{setting} {reference!r}: transformers {transformers.__version__} builds no model of "
            f"the family {kind!r}: {error}"
        ) from None


def _part_size(model: ModelConfig, name: str, part: Any) -> ModelSize:
    """Count the parameters of a pretrained part, which is trained fully, trained by adapters, or
    frozen.
    """
    total = sum(p.numel() for p in part.parameters())
    if name in model.frozen:
        return ModelSize(total, 0)
    if name in model.adapters:
        lora, setting = model.adapters[name]
        adapters = _adapter_parameters(part, lora, setting)
        return ModelSize(total + adapters, adapters, adapters)
    fixed = sum(p.numel() for name, p in part.named_parameters() if name.startswith("pooler."))
    return ModelSize(total, total - fixed)


def expected_precision(run: NamedRun) -> Precision:
    """Number type in which a run computes; for `auto`, as chosen on machines like this one."""
    asked = run.model.backbone.dtype
    if asked == "auto":
        return auto_precision("cuda" if placed_here(run.placement).on_gpu else "cpu")
    return Precision(asked, "as set")


def worker_memory(
    size: ModelSize,
    dtype: str,
    placement: Placement,
    state_bytes: int = 12,
    *,
    teaches: bool = False,
) -> WorkerMemory:
    """Bytes of a worker under the placement's ZeRO stage (arXiv 1910.02054, figure 1).

    Of an elastic run at its fewest workers, when each holds most. Of what ZeRO does not partition a
    worker has all but the experts of the others of its group; what it partitions is cut into as
    many parts as there are workers either way.

    Args:
        state_bytes: of the optimiser for each trainable parameter, 12 for AdamW: a master weight in
            fp32 and two moments.
        teaches: whether a teacher of hidden states runs in the step; it is counted as large as the
            model, and may be larger.
    """
    zero, workers, width = placement.zero_stage, placement.fewest_workers, WIDTHS[dtype]
    elsewhere = size.experts - size.experts // placement.expert_parallel

    def share(parameters: int, each: int, partitioned_from: int) -> int:
        if zero >= partitioned_from:
            return -(-parameters * each // workers)
        return (parameters - elsewhere) * each

    each_reduced = not placement.reduce_once  # else every worker has whole ones, in fp32
    return WorkerMemory(
        weights=share(size.total, width, 3),
        gradients=share(size.trainable, WIDTHS["float32"], 2 if each_reduced else 4),
        optimizer=share(size.trainable, state_bytes, 1),
        teacher=(size.total - size.adapters) * width if teaches else 0,
    )


def checkpoint_bytes(run: Run, size: ModelSize) -> int:
    """Bytes in storage of the checkpoints and trained weights at the end of training.

    A checkpoint holds what the optimiser has; of each stage the newest `keep_checkpoints` stay
    until the run is done, and with `keep_states` for good. The
    weights, in the model's dtype, stay as well.
    """
    states = sum(
        min(run.placement.keep_checkpoints, -(-stage.steps // stage.checkpoint_every_steps))
        * stage.optimizer.state_bytes
        for stage in run.stages
    )
    weights = len(run.stages) * WIDTHS[expected_precision(run).dtype]
    return size.trainable * (states + weights)


def export_bytes(run: Run, size: ModelSize) -> int:
    """Bytes of the models that the run exports, with adapters merged into the weights.

    One after each stage, the untrained one where it is scored, and mixtures of a guard.
    """
    further = (run.takes_scores and run.evaluation.before_training) + run.evaluation.num_mixtures
    width = WIDTHS[expected_precision(run).dtype]
    return (size.total - size.adapters) * width * (len(run.stages) + further)


def _adapter_parameters(part: Any, lora: LoraConfig, setting: str) -> int:
    """Count the parameters of the LoRA matrices A (rank, in) and B (out, rank) of all adapted
    layers.
    """
    from rayembed.models.adapters.lora import check_targets, linear_layers

    layers = linear_layers(part)
    check_targets(lora, layers, setting=setting)
    adapted = (layer for target in set(lora.target_modules) for layer in layers[target])
    return lora.rank * sum(layer.in_features + layer.out_features for layer in adapted)
