"""What a run would need: parameters, memory, disk, texts a step; counted without loading weights.

Models are built on torch's meta device from the configuration of their backbone alone. Ray is not
imported.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayembed.assets.samples import MINILM, SMOLLM2
from rayembed.config.model import BiEncoderConfig, LoraConfig, NVEmbedConfig
from rayembed.config.run import Placement, Run
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError

_MISTRAL_7B = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
_MINILM_L6 = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    SMOLLM2: _SMOLLM2_135M,
    MINILM: _MINILM_L6,
    "hf://mistralai/Mistral-7B-v0.1": _MISTRAL_7B,
    "hf://HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    "hf://HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "hf://sentence-transformers/all-MiniLM-L6-v2": _MINILM_L6,
}
"""Shapes of backbones that recipes name, so that their sizes are known without the hub."""

_BYTES = {"bfloat16": 2, "float32": 4}

_OPTIMIZER_BYTES = 12
"""fp32 master weight and Adam's two moments, for each trainable parameter (arXiv 1910.02054)."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters."""

    total: int
    """Backbone, adapters and pooling, without a language-model head."""
    trainable: int
    """Those that the optimiser changes."""
    adapters: int = 0
    """Those of LoRA, which are merged into the others when a model is exported."""


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that one worker holds besides activations, a lower bound of its memory."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StepLoad:
    """What one step of a stage processes over all workers, at most."""

    texts: int
    """Queries, positives and hard negatives; equal texts are encoded once."""
    tokens: int
    """If each text had its full length."""


def backbone_settings(reference: str) -> dict[str, Any] | None:
    """The backbone's configuration as far as this machine knows it; None where only the hub does.

    Raises:
        ConfigError: a local path without a model.
    """
    import json

    published = PUBLISHED.get(reference) or PUBLISHED.get(reference.partition("@")[0])
    if published is not None:
        return published
    if "://" in reference:
        return None
    path = Path(reference).expanduser() / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.backbone.path {reference!r}: no model there: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"model.backbone.path {reference!r}: config.json is no JSON object")
    return settings


def model_size(model: NVEmbedConfig | BiEncoderConfig) -> ModelSize | None:
    """Numbers of parameters of a model; None where its backbone's shape is not known here.

    Raises:
        ConfigError: a family that transformers lacks, heads that do not fit the hidden size,
            adapters on layers that the backbone does not have.
    """
    settings = backbone_settings(model.backbone.path)
    if settings is None:
        return None
    import torch
    import transformers

    from rayembed.models.pooling import build_head

    family = dict(settings)
    kind = str(family.pop("model_type", ""))
    try:
        config = transformers.AutoConfig.for_model(kind, **family)
        with torch.device("meta"):
            backbone = transformers.AutoModel.from_config(config)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model.backbone.path {model.backbone.path!r}: transformers {transformers.__version__} "
            f"builds no model of the family {kind!r}: {error}"
        ) from None
    with torch.device("meta"):
        pooling = build_head(model, int(config.hidden_size))
    pooled = sum(p.numel() for p in pooling.parameters())
    frozen = sum(p.numel() for name, p in backbone.named_parameters() if name.startswith("pooler."))
    total = sum(p.numel() for p in backbone.parameters())
    if model.lora is None:
        return ModelSize(total + pooled, total - frozen + pooled)
    adapters = _adapter_parameters(backbone, model.lora)
    return ModelSize(total + adapters + pooled, adapters + pooled, adapters)


def worker_memory(size: ModelSize, dtype: str, placement: Placement) -> WorkerMemory:
    """Bytes of a worker under the placement's ZeRO stage (arXiv 1910.02054, figure 1)."""
    zero, workers, width = placement.zero_stage, placement.workers, _BYTES[dtype]
    return WorkerMemory(
        weights=_share(size.total * width, workers, zero >= 3),
        gradients=_share(size.trainable * width, workers, zero >= 2),
        optimizer=_share(size.trainable * _OPTIMIZER_BYTES, workers, zero >= 1),
    )


def checkpoint_bytes(run: Run, size: ModelSize) -> int:
    """Bytes of the checkpoints and the trained weights that lie in storage when the run is done.

    A checkpoint holds what the optimiser has; of each stage the best `keep_checkpoints` stay and
    the latest, which may not be among them. The weights, in the model's dtype, stay as well.
    """
    kept = sum(
        min(run.placement.keep_checkpoints + 1, -(-stage.steps // stage.checkpoint_every_steps))
        for stage in run.stages
    )
    weights = len(run.stages) * _BYTES[run.model.backbone.dtype]
    return size.trainable * (kept * _OPTIMIZER_BYTES + weights)


def export_bytes(run: Run, size: ModelSize) -> int:
    """Bytes of the models that the run exports, adapters merged.

    One after each stage, and the untrained one where it is scored.
    """
    untrained = run.evaluation.suite != "none" and run.evaluation.before_training
    width = _BYTES[run.model.backbone.dtype]
    return (size.total - size.adapters) * width * (len(run.stages) + untrained)


def step_load(run: Run, stage: StageConfig) -> StepLoad:
    """Texts and tokens of one step, at most."""
    documents = 1 + stage.batch.num_negatives
    tokens = run.model.query_max_length + documents * run.model.document_max_length
    return StepLoad(
        texts=stage.batch.global_pairs * (1 + documents), tokens=stage.batch.global_pairs * tokens
    )


def _share(amount: int, workers: int, divided: bool) -> int:
    return -(-amount // workers) if divided else amount


def _adapter_parameters(backbone: Any, lora: LoraConfig) -> int:
    """Parameters of A (rank, in) and B (out, rank) over all layers that the adapters name."""
    shapes: dict[str, list[int]] = {}
    for name, module in backbone.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.ndim == 2:
            shapes.setdefault(name.rpartition(".")[2], []).append(sum(weight.shape))
    missing = [target for target in lora.target_modules if target not in shapes]
    if len(missing) == len(lora.target_modules):
        raise ConfigError(
            f"model.lora.target_modules {list(lora.target_modules)}: the backbone has no such "
            f"layers; it has {', '.join(sorted(shapes))}. Name some of them, or set model.lora=null"
        )
    return lora.rank * sum(sum(shapes.get(target, [])) for target in lora.target_modules)
