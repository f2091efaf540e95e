"""Models from settings and from folders."""

from pathlib import Path
from typing import Any

import torch

from rayembed.config.model import BiEncoderConfig, Dtype, ModelConfig, NVEmbedConfig
from rayembed.errors import ArtifactError
from rayembed.models.backbones import DTYPES, load_backbone
from rayembed.models.biencoder import BiEncoder
from rayembed.models.json_file import read_json
from rayembed.models.lora import add_lora
from rayembed.models.nvembed import NVEmbed
from rayembed.models.pooled_transformer import PooledTransformer
from rayembed.models.pooling import build_pooling
from rayembed.models.tokens import BiEncoderTokenizer, NVEmbedTokenizer, SpecialIds


def build_model(config: ModelConfig, backbone_folder: Path, *, seed: int) -> PooledTransformer:
    """The model to train: pretrained backbone, fresh pooling, fresh adapters, in training mode.

    Everything is in the config's dtype, on the CPU. The same seed gives the same weights whatever
    the state of the random generators, and leaves that state as it was.

    Raises:
        ArtifactError: no usable model or tokenizer in `backbone_folder`.
        ConfigError: settings that do not fit the backbone.
    """
    tokenizer = make_tokenizer(config, backbone_folder)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed GPUs too, and their state is not put back.
        torch.default_generator.manual_seed(seed)
        mask = config.mask if isinstance(config, NVEmbedConfig) else "own"
        backbone = load_backbone(backbone_folder, config.backbone, mask=mask)
        pooling = build_pooling(config.pooling, backbone.config.hidden_size)
        pooling.to(DTYPES[config.backbone.dtype])
        if config.lora is not None:
            add_lora(backbone, config.lora)
    return assemble(config, backbone, pooling, tokenizer).train()


def assemble(
    config: ModelConfig,
    backbone: Any,
    pooling: torch.nn.Module,
    tokenizer: NVEmbedTokenizer | BiEncoderTokenizer,
) -> PooledTransformer:
    """The model class of the config around finished parts."""
    match config:
        case NVEmbedConfig():
            return NVEmbed(config, backbone, pooling, tokenizer)
        case BiEncoderConfig():
            return BiEncoder(config, backbone, pooling, tokenizer)


def make_tokenizer(config: ModelConfig, folder: Path) -> NVEmbedTokenizer | BiEncoderTokenizer:
    """The picklable tokenizer of a model whose backbone (or export) lies in the folder.

    Raises:
        ArtifactError: no fast tokenizer there, or one without an end-of-text token.
        ConfigError: maximum lengths that leave no room for text.
    """
    import transformers

    try:
        pretrained = transformers.AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"no tokenizer in {str(folder)!r}: {error}") from error
    if not pretrained.is_fast:
        raise ArtifactError(
            f"the tokenizer in {str(folder)!r} is not a fast one; convert it to a tokenizer.json"
        )
    match config:
        case NVEmbedConfig():
            settings = read_json(folder / "config.json")
            special = SpecialIds(pretrained, settings.get("text_config") or settings)
            return NVEmbedTokenizer(pretrained, config, special)
        case BiEncoderConfig():
            return BiEncoderTokenizer(pretrained, config)


def load_model(folder: Path, *, dtype: Dtype | None = None) -> PooledTransformer:
    """The model in a folder, ready to embed (evaluation mode, CPU).

    The folder is one that `save` wrote, a copy of nvidia/NV-Embed-v1 or v2, or an encoder in
    sentence-transformers format (transformer, mean or CLS pooling) or in transformers format
    (taken with mean pooling). Embeddings are always of unit length.

    Args:
        dtype: of weights and activations; None: as saved (float16 becomes float32).

    Raises:
        ArtifactError: nothing of the kind, damaged, or with parts that are not supported.
    """
    from rayembed.models.export import SETTINGS_FILE, load_saved
    from rayembed.models.nvidia_checkpoint import load_nvidia_checkpoint
    from rayembed.models.sentence_folder import read_encoder_folder

    folder = Path(folder)
    if (folder / SETTINGS_FILE).is_file():
        return load_saved(folder, dtype=dtype)
    if not any((folder / name).is_file() for name in ("modules.json", "config.json")):
        raise ArtifactError(
            f"no model in {str(folder)!r}: neither {SETTINGS_FILE}, modules.json nor config.json"
        )
    if _is_published_nvembed(folder):
        return load_nvidia_checkpoint(folder, dtype=dtype or "bfloat16").eval()
    config, transformer = read_encoder_folder(folder, dtype=dtype)
    backbone = load_backbone(transformer, config.backbone, mask="own")
    pooling = build_pooling(config.pooling, backbone.config.hidden_size)
    return assemble(config, backbone, pooling, make_tokenizer(config, transformer)).eval()


def _is_published_nvembed(folder: Path) -> bool:
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == "nvembed"
