"""Models from settings and from folders."""

from pathlib import Path
from typing import Any

import torch

from rayembed.config.model import (
    BackboneConfig,
    BiEncoderConfig,
    Dtype,
    ModelConfig,
    NVEmbedConfig,
)
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.backbones import (
    DTYPES,
    check_backbone,
    empty_backbone,
    load_backbone,
    num_positions,
)
from rayembed.models.biencoder import BiEncoder
from rayembed.models.json_file import read_json
from rayembed.models.lora import add_lora
from rayembed.models.nvembed import NVEmbed
from rayembed.models.pooled_transformer import PooledTransformer
from rayembed.models.pooling import build_head
from rayembed.models.tokens import (
    BiEncoderTokenizer,
    NVEmbedTokenizer,
    SpecialIds,
    append_stated_eos,
)


def build_model(config: ModelConfig, backbone_folder: Path, *, seed: int) -> PooledTransformer:
    """The model to train: pretrained backbone, pooling, fresh adapters, in training mode.

    The pooling is fresh too, unless the folder has a trained one of the same kind (see `start`).
    Everything is in the config's dtype, on the CPU. The same seed gives the same weights whatever
    the state of the random generators, and leaves that state as it was.

    Raises:
        ArtifactError: no usable model or tokenizer in `backbone_folder`.
        ConfigError: settings that do not fit the backbone.
    """
    from rayembed.models.start import find_start

    transformer, load_head = find_start(backbone_folder, config)
    tokenizer = make_tokenizer(config, transformer)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed GPUs too, and their state is not put back.
        torch.default_generator.manual_seed(seed)
        mask = config.mask if isinstance(config, NVEmbedConfig) else "own"
        backbone = load_backbone(transformer, config.backbone, mask=mask)
        pooling = build_head(config, backbone.config.hidden_size)
        if load_head is not None:
            load_head(pooling)
        pooling.to(DTYPES[config.backbone.dtype])
        if config.lora is not None:
            add_lora(backbone, config.lora)
    return assemble(config, backbone, pooling, tokenizer).train()


def check_buildable(
    config: ModelConfig, backbone_folder: Path
) -> NVEmbedTokenizer | BiEncoderTokenizer:
    """The model's tokenizer, after `build_model` was found possible without reading weights.

    Raises:
        ArtifactError: no usable model or tokenizer in `backbone_folder`.
        ConfigError: settings that do not fit the backbone.
    """
    from rayembed.models.start import find_start

    backbone_folder, _ = find_start(backbone_folder, config)
    tokenizer = make_tokenizer(config, backbone_folder)
    mask = config.mask if isinstance(config, NVEmbedConfig) else "own"
    backbone = empty_backbone(backbone_folder, config.backbone, mask=mask)
    positions = num_positions(backbone)
    for role, length in tokenizer.max_lengths.items():
        if positions is not None and length > positions:
            raise ConfigError(
                f"model.{role}_max_length is {length}, but the backbone has learnt {positions} "
                f"positions; set it to {positions} at most"
            )
    with torch.device("meta"):
        build_head(config, backbone.config.hidden_size)
        if config.lora is not None:
            add_lora(backbone, config.lora)
    return tokenizer


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
            append_stated_eos(pretrained, folder)
            return BiEncoderTokenizer(pretrained, config)


def load_model(folder: Path, *, dtype: Dtype | None = None) -> PooledTransformer:
    """The model in a folder, ready to embed (evaluation mode, CPU).

    The folder is one that `save` wrote, a copy of nvidia/NV-Embed-v1 or v2, or an encoder in
    sentence-transformers format (transformer, pooling by one mode, Dense and Normalize modules) or
    in transformers format (taken with mean pooling). A decoder keeps its causal mask. Embeddings
    are always of unit length.

    Args:
        dtype: of weights and activations; None: as saved (float16 becomes float32).

    Raises:
        ArtifactError: nothing of the kind, damaged, or with parts that are not supported.
    """
    from rayembed.models.export import SETTINGS_FILE, load_saved
    from rayembed.models.nvidia_checkpoint import load_nvidia_checkpoint
    from rayembed.models.sentence_folder import load_projections, read_encoder_folder

    folder = Path(folder)
    _check_is_model(folder)
    if (folder / SETTINGS_FILE).is_file():
        return load_saved(folder, dtype=dtype)
    if _is_published_nvembed(folder):
        return load_nvidia_checkpoint(folder, dtype=dtype or "bfloat16").eval()
    config, transformer, dense = read_encoder_folder(folder, dtype=dtype)
    backbone = load_backbone(transformer, config.backbone, mask="own")
    pooling = build_head(config, backbone.config.hidden_size)
    load_projections(pooling, dense)
    pooling.to(DTYPES[config.backbone.dtype])
    return assemble(config, backbone, pooling, make_tokenizer(config, transformer)).eval()


def check_loadable(folder: Path) -> None:
    """Return when `load_model` takes the folder, as far as its files tell without the weights.

    Architecture, pooling and tokenizer are known, and there are weights.

    Raises:
        ArtifactError: as `load_model`.
    """
    from rayembed.models.export import SETTINGS_FILE, read_settings
    from rayembed.models.sentence_folder import read_encoder_folder

    _check_is_model(folder)
    config: ModelConfig
    if (folder / SETTINGS_FILE).is_file():
        config, transformer = read_settings(folder), folder
        check_backbone(folder)
    elif _is_published_nvembed(folder):
        config, transformer = NVEmbedConfig(backbone=BackboneConfig(path=str(folder))), folder
    else:
        config, transformer, _ = read_encoder_folder(folder)
        check_backbone(transformer)
    make_tokenizer(config, transformer)
    if not any(path.suffix in (".safetensors", ".bin") for path in transformer.iterdir()):
        raise ArtifactError(
            f"no weights in {str(transformer)!r}; expected *.safetensors or pytorch_model.bin"
        )


def _check_is_model(folder: Path) -> None:
    from rayembed.models.export import SETTINGS_FILE

    if not any((folder / n).is_file() for n in (SETTINGS_FILE, "modules.json", "config.json")):
        raise ArtifactError(
            f"no model in {str(folder)!r}: neither {SETTINGS_FILE}, modules.json nor config.json"
        )


def _is_published_nvembed(folder: Path) -> bool:
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == "nvembed"
