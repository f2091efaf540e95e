"""Bi-encoders in the common formats: sentence-transformers and plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayembed.config.backbone import BackboneConfig, Dtype, MeanPooling, ProjectionConfig
from rayembed.errors import ArtifactError
from rayembed.models.architecture import ModuleEntry
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.backbones import check_backbone, empty_backbone, num_positions
from rayembed.models.loading.files import read_header, read_json, weight_paths, write_json
from rayembed.models.loading.sentence_folder import (
    ACTIVATIONS,
    POOLING_KEYS,
    Modules,
    Stated,
    check_default_prompt,
    mode_of,
    read_modules,
    read_stated,
    stated_dtype,
)
from rayembed.models.tokens import has_lowercase
from rayembed.models.transformer_model import PooledTransformer

_UNLIMITED = 10**6  # tokenizers without a limit say 1e30


class EncoderFolder(NamedTuple):
    """Encoder that rayembed did not write, described as a bi-encoder."""

    config: BiEncoderConfig
    transformer: Path
    """Folder of the transformer and its tokenizer."""
    dense: tuple[Path, ...]
    """Weight files of the config's projections."""


def read_encoder_folder(folder: Path, *, dtype: Dtype | None = None) -> EncoderFolder:
    """Describe an encoder folder as a bi-encoder: read its settings and locate its weights.

    Reads JSON alone. Prompts named `query` and `document` (or `passage`, `corpus`) become the
    roles' prefixes. A folder without `modules.json` is taken with mean pooling.

    Raises:
        ArtifactError: parts or settings by which a bi-encoder would give other vectors.
    """
    modules = Modules(folder, MeanPooling(), (), (), normalized=False, max_length=None)
    stated = Stated({}, "", None, None)
    if (folder / "modules.json").is_file():
        modules, stated = read_modules(folder), read_stated(folder)
        _check_similarity(folder, stated, normalized=modules.normalized)
    prompts = stated.prompts
    document = next((prompts[n] for n in ("document", "passage", "corpus") if prompts.get(n)), "")
    check_default_prompt(folder, stated, document)
    length = _max_length(modules.transformer, modules.max_length)
    config = BiEncoderConfig(
        backbone=BackboneConfig(
            path=str(modules.transformer), dtype=dtype or stated_dtype(modules.transformer)
        ),
        pooling=modules.pooling,
        projections=modules.projections,
        width=stated.width,
        query_prefix=prompts.get("query", ""),
        document_prefix=document,
        query_max_length=length,
        document_max_length=length,
    )
    return EncoderFolder(config, modules.transformer, modules.dense)


def published_width(found: EncoderFolder) -> int:
    """Read the width of an encoder's vectors from its settings, without loading weights.

    Raises:
        ArtifactError: they state none.
    """
    if found.config.projections:
        whole: int | None = found.config.projections[-1].width
    else:
        stated = read_json(found.transformer / "config.json")
        whole = (stated.get("text_config") or stated).get("hidden_size") or stated.get("dim")
    if whole is None:
        raise ArtifactError(f"{str(found.transformer)!r} states no hidden size in its config.json")
    return min(whole, found.config.width or whole)


def write_plain_format(model: PooledTransformer, folder: Path) -> list[ModuleEntry]:
    """Write the files that sentence-transformers reads without rayembed; return the entries of
    `modules.json`.

    It has one maximum length for both roles: the larger one. It computes in the number type that
    config.json states, which is float32 whatever the weights are saved in: a CPU without bfloat16
    units emulates them at a tenth of the speed.
    """
    config = model.config
    assert isinstance(config, BiEncoderConfig)
    modules = ["Transformer", "Pooling", *["Dense"] * len(config.projections), "Normalize"]
    places = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i > 0)]
    mode = mode_of(config.pooling)
    write_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": int(model.backbone.config.hidden_size),
            **{key: known == mode for key, known in POOLING_KEYS.items()},
        },
    )
    if config.projections:
        _write_projections(model.head, config.projections, folder)
    write_json(
        folder / "sentence_bert_config.json",
        {
            "max_seq_length": max(config.max_lengths.values()),
            "do_lower_case": has_lowercase(model.part_tokenizers["backbone"].backend_tokenizer),
        },
    )
    write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "float32"})
    types = [f"sentence_transformers.models.{name}" for name in modules]
    return [ModuleEntry(place, kind) for place, kind in zip(places, types, strict=True)]


def _write_projections(head: Any, configs: Sequence[ProjectionConfig], folder: Path) -> None:
    """Write each projection as a Dense module of sentence-transformers."""
    import safetensors.torch

    names = {activation: name for name, activation in ACTIVATIONS.items()}
    for i, (layer, config) in enumerate(zip(head.projections, configs, strict=True), start=2):
        write_json(
            folder / f"{i}_Dense" / "config.json",
            {
                "in_features": layer.linear.in_features,
                "out_features": layer.linear.out_features,
                "bias": config.bias,
                "activation_function": names[config.activation],
            },
        )
        state = {name: value.contiguous() for name, value in layer.state_dict().items()}
        safetensors.torch.save_file(state, folder / f"{i}_Dense" / "model.safetensors")


def _check_similarity(folder: Path, stated: Stated, *, normalized: bool) -> None:
    """Raise for a model whose similarity function is not the cosine and so depends on the length of
    vectors.
    """
    # What is cut behind the Normalize module is of unit length no longer.
    unit = normalized and stated.width is None
    if stated.similarity not in (None, "cosine", *(("dot", "euclidean") if unit else ())):
        why = "" if normalized else " without normalising them"
        why += "" if stated.width is None else f" and cuts them (truncate_dim={stated.width})"
        raise ArtifactError(
            f"{str(folder)!r} compares vectors by {stated.similarity!r}{why} "
            "(similarity_fn_name), but rayembed's vectors are of unit length, so only 'cosine' is "
            "supported, and 'dot' after a Normalize module"
        )


def _max_length(transformer: Path, stated: int | None) -> int:
    """Determine the maximum tokens of a text as sentence-transformers does, at most the number of
    learnt positions.

    Args:
        stated: of the Transformer module; None: the smaller of tokenizer's and transformer's, by
            transformers' own configuration, since families have names and defaults of their own.
    """
    settings = check_backbone(transformer)
    limit = getattr(settings, "max_position_embeddings", None)
    limits: list[object] = [stated]
    if stated is None:
        path = transformer / "tokenizer_config.json"
        tokenizer = read_json(path) if path.is_file() else {}
        limits = [tokenizer.get("model_max_length", tokenizer.get("max_len")), limit]
    # RoBERTa's positions count from behind the padding's id on.
    unused = 1 + (getattr(settings, "pad_token_id", None) or 0)
    if limit is not None and (stated is None or stated > limit - unused):
        backbone = BackboneConfig(path=str(transformer), dtype="float32")
        limits.append(num_positions(empty_backbone(transformer, backbone, mask="own")))
    found = [int(n) for n in limits if isinstance(n, int | float) and 0 < n < _UNLIMITED]
    if not found:
        raise ArtifactError(
            f"{str(transformer)!r} states no maximum length of a text; set model_max_length in its "
            "tokenizer_config.json"
        )
    return min(found)


def saved_in_float16(found: EncoderFolder) -> bool:
    """Whether all floating-point weights are float16, according to the headers of the safetensors
    files.
    """
    paths = [*weight_paths(found.transformer), *found.dense]
    if any(path.suffix != ".safetensors" or not path.is_file() for path in paths):
        return False
    kinds = {tensor["dtype"] for path in paths for tensor in read_header(path).values()}
    return "F16" in kinds and not kinds & {"F32", "F64", "BF16"}
