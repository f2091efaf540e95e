"""Bi-encoders in usual formats: sentence-transformers' or plain transformers'."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayembed.config.backbone import BackboneConfig, Dtype
from rayembed.config.pooling import MeanPooling, ProjectionConfig
from rayembed.errors import ArtifactError
from rayembed.models.architecture import SentenceModule
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.files import read_header, read_json, weight_paths, write_json
from rayembed.models.sentence_folder import (
    ACTIVATIONS,
    POOLING_KEYS,
    Modules,
    mode_of,
    read_modules,
    stated_dtype,
)
from rayembed.models.transformer_model import PooledTransformer

_UNLIMITED = 10**6  # tokenizers without a limit say 1e30


class EncoderFolder(NamedTuple):
    """A foreign encoder folder described as a bi-encoder."""

    config: BiEncoderConfig
    transformer: Path
    """Folder of the transformer and its tokenizer."""
    dense: tuple[Path, ...]
    """Weight files of the config's projections."""


def read_encoder_folder(folder: Path, *, dtype: Dtype | None = None) -> EncoderFolder:
    """Settings that describe an encoder as a bi-encoder, with the locations of its weights.

    Reads JSON alone. Prompts named `query` and `document` (or `passage`, `corpus`) become the
    roles' prefixes. A folder without `modules.json` is taken with mean pooling.

    Raises:
        ArtifactError: parts or settings by which a bi-encoder would give other vectors.
    """
    modules = Modules(folder, MeanPooling(), (), (), normalized=False)
    settings: dict[str, Any] = {}
    if (folder / "modules.json").is_file():
        modules = read_modules(folder)
        if (folder / "config_sentence_transformers.json").is_file():
            settings = read_json(folder / "config_sentence_transformers.json")
        _check_similarity(folder, settings, normalized=modules.normalized)
    prompts = settings.get("prompts") or {}
    document = next((prompts[n] for n in ("document", "passage", "corpus") if prompts.get(n)), "")
    length = _max_length(modules.transformer)
    config = BiEncoderConfig(
        backbone=BackboneConfig(
            path=str(modules.transformer), dtype=dtype or stated_dtype(modules.transformer)
        ),
        pooling=modules.pooling,
        projections=modules.projections,
        query_prefix=prompts.get("query") or "",
        document_prefix=document,
        query_max_length=length,
        document_max_length=length,
    )
    return EncoderFolder(config, modules.transformer, modules.dense)


def published_width(found: EncoderFolder) -> int:
    """Width of an encoder's vectors, by its settings alone.

    Raises:
        ArtifactError: they state none.
    """
    if found.config.projections:
        return found.config.projections[-1].width
    stated = read_json(found.transformer / "config.json")
    width = (stated.get("text_config") or stated).get("hidden_size") or stated.get("dim")
    if width is None:
        raise ArtifactError(f"{str(found.transformer)!r} states no hidden size in its config.json")
    return int(width)


def write_plain_format(model: PooledTransformer, folder: Path) -> list[SentenceModule]:
    """Write what sentence-transformers reads where rayembed is not installed; its modules.

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
        {"max_seq_length": max(config.max_lengths.values()), "do_lower_case": False},
    )
    write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "float32"})
    types = [f"sentence_transformers.models.{name}" for name in modules]
    return [SentenceModule(place, kind) for place, kind in zip(places, types, strict=True)]


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


def _check_similarity(folder: Path, settings: Mapping[str, Any], *, normalized: bool) -> None:
    """Raise for a model whose vectors are compared by more than their direction."""
    similarity = settings.get("similarity_fn_name")
    if similarity not in (None, "cosine") and not (
        normalized and similarity in ("dot", "euclidean")
    ):
        raise ArtifactError(
            f"{str(folder)!r} compares vectors by {similarity!r}"
            f"{'' if normalized else ' without normalising them'}; rayembed's vectors are of unit "
            "length, so supported are 'cosine', and 'dot' behind a Normalize module"
        )


def _max_length(transformer: Path) -> int:
    """Smallest length limit stated in the folder, as in sentence-transformers."""
    path = transformer / "sentence_bert_config.json"
    settings = read_json(path) if path.is_file() else {}
    if isinstance(settings.get("max_seq_length"), int):
        return int(settings["max_seq_length"])
    path = transformer / "tokenizer_config.json"
    limits = [
        (read_json(path) if path.is_file() else {}).get("model_max_length"),
        read_json(transformer / "config.json").get("max_position_embeddings"),
    ]
    found = [int(n) for n in limits if isinstance(n, int | float) and 0 < n < _UNLIMITED]
    if not found:
        raise ArtifactError(f"{str(transformer)!r} states no maximum length of a text")
    return min(found)


def saved_in_float16(found: EncoderFolder) -> bool:
    """Whether all weights lie in safetensors files in float16, by the headers of these."""
    paths = [*weight_paths(found.transformer), *found.dense]
    if any(path.suffix != ".safetensors" or not path.is_file() for path in paths):
        return False
    kinds = {tensor["dtype"] for path in paths for tensor in read_header(path).values()}
    return "F16" in kinds and not kinds & {"F32", "F64", "BF16"}
