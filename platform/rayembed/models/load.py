"""Loading of a model folder: rayembed's own, a published one, or an encoder in a usual format."""

from pathlib import Path

import torch

from rayembed.config.backbone import BackboneConfig, Dtype
from rayembed.config.model import (
    BiEncoderConfig,
    Causal2VecConfig,
    CDEConfig,
    ModelConfig,
    NomicMoeConfig,
    NVEmbedConfig,
)
from rayembed.config.pooling import LatentAttentionPooling, SelfAttentionPooling
from rayembed.errors import ArtifactError
from rayembed.hardware import auto_precision, wide_enough
from rayembed.models.backbones import check_backbone, load_backbone, torch_dtype
from rayembed.models.build import assemble, build_head, empty_main, load_main, make_tokenizer
from rayembed.models.cde_checkpoint import (
    is_published_cde,
    load_published_cde,
    published_cde_config,
)
from rayembed.models.export import (
    POOLING_FILE,
    SETTINGS_FILE,
    encoder_folder,
    load_saved,
    read_settings,
)
from rayembed.models.json_file import read_json
from rayembed.models.nomic_moe_start import is_published_nomic, published_nomic_config
from rayembed.models.nvidia_checkpoint import load_nvidia_checkpoint, published_config
from rayembed.models.sentence_folder import load_projections, read_encoder_folder
from rayembed.models.transformer_model import TransformerModel


def load_model(folder: Path, *, dtype: Dtype | None = None) -> TransformerModel:
    """Load the model in a folder for embedding (evaluation mode, CPU).

    The folder is one that `save` wrote, a copy of nvidia/NV-Embed-v1 or v2, of jxm/cde-small-v1 or
    v2 or of nomic-ai/nomic-embed-text-v2-moe, or an encoder in sentence-transformers format
    (transformer, pooling by one mode, Dense and Normalize modules) or in transformers format (taken
    with mean pooling). A decoder keeps its causal mask. Embeddings are always of unit length.

    Args:
        dtype: of weights and activations; None: as saved (float16 becomes float32), but float32
            where this machine emulates bfloat16.

    Raises:
        ArtifactError: nothing of the kind, damaged, or with parts that are not supported.
    """
    folder = Path(folder)
    _check_is_model(folder)
    dtype = dtype or wide_enough(saved_dtype(folder))
    if (folder / SETTINGS_FILE).is_file():
        return load_saved(folder, dtype=dtype)
    if _is_published_nvembed(folder):
        return load_nvidia_checkpoint(folder, dtype=dtype).eval()
    if is_published_cde(folder):
        return load_published_cde(folder, dtype=dtype)
    if is_published_nomic(folder):
        published = published_nomic_config(folder, dtype)
        encoder = load_main(folder, published)
        tokenizer = make_tokenizer(published, folder)
        return assemble(published, encoder, None, torch.nn.Identity(), tokenizer).eval()
    config, transformer, dense = read_encoder_folder(folder, dtype=dtype)
    backbone = load_backbone(transformer, config.backbone, mask="own")
    head = build_head(config, backbone.config, None)
    load_projections(head, dense)
    head.to(torch_dtype(config.backbone.dtype))
    return assemble(config, backbone, None, head, make_tokenizer(config, transformer)).eval()


def saved_dtype(folder: Path) -> Dtype:
    """Number type of the saved weights; float32 for float16.

    Reads JSON alone; of a folder that states none the first weight's header. `auto`, which settings
    written by hand may have, is what this machine computes fast.

    Raises:
        ArtifactError: as `load_model`, as far as settings tell.
    """
    _check_is_model(folder)
    saved = _saved_backbone(folder).dtype
    return auto_precision().dtype if saved == "auto" else saved


def _saved_backbone(folder: Path) -> BackboneConfig:
    if (folder / SETTINGS_FILE).is_file():
        return read_settings(folder).backbone
    if _is_published_nvembed(folder):
        return published_config(folder).backbone
    if is_published_cde(folder):
        return published_cde_config(folder).backbone
    if is_published_nomic(folder):
        return published_nomic_config(folder, None).backbone
    return read_encoder_folder(folder).config.backbone


def check_loadable(folder: Path) -> ModelConfig:
    """Settings of the model, after checking by its files that `load_model` can load it.

    Architecture, pooling and tokenizer are known, and there are weights, which are not read.

    Raises:
        ArtifactError: as `load_model`.
    """
    _check_is_model(folder)
    config: ModelConfig
    encoder = None
    if (folder / SETTINGS_FILE).is_file():
        config, transformer = read_settings(folder), folder
        encoder = encoder_folder(config, folder)
        if isinstance(config, NomicMoeConfig):
            empty_main(folder, config)
        else:
            check_backbone(folder)
        if _head_has_weights(config) and not (folder / POOLING_FILE).is_file():
            raise ArtifactError(
                f"the model in {str(folder)!r} is incomplete: {POOLING_FILE} is missing, the "
                "weights behind its pretrained parts; copy or export the folder again"
            )
    elif is_published_nomic(folder):
        config, transformer = published_nomic_config(folder, None), folder
        empty_main(folder, config)
    elif _is_published_nvembed(folder):
        config, transformer = published_config(folder), folder
    elif is_published_cde(folder):
        config, transformer = published_cde_config(folder), folder
    else:
        config, transformer, _ = read_encoder_folder(folder)
        check_backbone(transformer)
    if encoder is not None:
        check_backbone(encoder)
    make_tokenizer(config, transformer, encoder)
    for part in (transformer,) if encoder is None else (transformer, encoder):
        if not any(path.suffix in (".safetensors", ".bin") for path in part.iterdir()):
            raise ArtifactError(
                f"no weights in {str(part)!r}; expected *.safetensors or pytorch_model.bin"
            )
    return config


def _head_has_weights(config: ModelConfig) -> bool:
    """Whether anything after the pretrained parts is trained."""
    match config:
        case NVEmbedConfig():
            return isinstance(config.pooling, LatentAttentionPooling | SelfAttentionPooling)
        case BiEncoderConfig():
            return bool(config.projections)
        case Causal2VecConfig():
            return config.encoder is not None and config.representation != "separate"
        case CDEConfig():
            return True
        case NomicMoeConfig():
            return False


def _check_is_model(folder: Path) -> None:
    if not any((folder / n).is_file() for n in (SETTINGS_FILE, "modules.json", "config.json")):
        raise ArtifactError(
            f"no model in {str(folder)!r}: neither {SETTINGS_FILE}, modules.json nor config.json"
        )


def _is_published_nvembed(folder: Path) -> bool:
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == "nvembed"
