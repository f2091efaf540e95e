"""A model's own folder: written whole or not at all, read back to the same vectors.

transformers format for the (merged) backbone and the tokenizer, `pooling.safetensors` for what
pools, `rayembed.json` for the settings, `modules.json` for sentence-transformers. A bi-encoder
with one maximum length is plain sentence-transformers format, so that it loads where rayembed is
not installed; other models name `SentenceModule`.
"""

import copy
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayembed.config.model import (
    BiEncoderConfig,
    Dtype,
    ModelConfig,
    NVEmbedConfig,
    ProjectionConfig,
)
from rayembed.errors import ArtifactError
from rayembed.models.backbones import DTYPES, load_backbone
from rayembed.models.contract import settings_of
from rayembed.models.json_file import read_json, write_json
from rayembed.models.lora import merged_state
from rayembed.models.pooled_transformer import PooledTransformer
from rayembed.models.pooling import build_head
from rayembed.models.sentence_folder import ACTIVATIONS, POOLING_KEYS, mode_of

SETTINGS_FILE = "rayembed.json"
POOLING_FILE = "pooling.safetensors"
FORMAT_VERSION = 1
_MODULE_CLASS = "rayembed.models.sentence_module.SentenceModule"


def save_model(
    model: PooledTransformer, folder: Path, *, instructions: Mapping[str, str] | None = None
) -> None:
    """Write the model to a folder, through a temporary one beside it that is then renamed.

    An older model in the folder is replaced.

    Raises:
        ArtifactError: the folder holds something else than a model of rayembed.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"cannot save to {str(folder)!r}: it is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SETTINGS_FILE).is_file():
        raise ArtifactError(
            f"cannot save to {str(folder)!r}: it holds files of something else; name a new folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        written = temporary / "model"
        written.mkdir()
        write_files(model, written, instructions=instructions)
        if folder.exists():
            folder.rename(temporary / "replaced")
        written.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_files(
    model: PooledTransformer, folder: Path, *, instructions: Mapping[str, str] | None = None
) -> None:
    """Write the files of a model into an existing folder."""
    import safetensors.torch

    model.backbone.save_pretrained(str(folder), state_dict=merged_state(model.backbone))
    pooling = {name: value.contiguous() for name, value in model.pooling.state_dict().items()}
    if pooling:
        safetensors.torch.save_file(pooling, folder / POOLING_FILE)
    _padding_tokenizer(model).save_pretrained(str(folder))
    settings = settings_of(model.config.model_copy(update={"lora": None}))
    write_json(
        folder / SETTINGS_FILE,
        {
            "format_version": FORMAT_VERSION,
            "model": settings,
            "dimensions": list(model.dimensions),
        },
    )
    _write_sentence_files(model, folder, instructions or {})
    for path in folder.rglob("*"):
        if path.is_file():
            os.chmod(path, 0o644)  # noqa: PTH101


def _padding_tokenizer(model: PooledTransformer) -> Any:
    """The tokenizer of transformers; a bi-encoder's pads with EOS where it has no token for it.

    sentence-transformers would not make a batch otherwise; what is padding stands in the mask.
    """
    pretrained = model.tokenizer.pretrained
    if pretrained.pad_token is None and isinstance(model.config, BiEncoderConfig):
        pretrained = copy.deepcopy(pretrained)
        pretrained.pad_token = pretrained.eos_token
    return pretrained


def _write_sentence_files(
    model: PooledTransformer, folder: Path, instructions: Mapping[str, str]
) -> None:
    config = model.config
    if isinstance(config, BiEncoderConfig) and (
        config.query_max_length == config.document_max_length
    ):
        modules = ["Transformer", "Pooling", *["Dense"] * len(config.projections), "Normalize"]
        places = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i > 0)]
        types = [f"sentence_transformers.models.{name}" for name in modules]
        mode = mode_of(config.pooling)
        write_json(
            folder / "1_Pooling" / "config.json",
            {
                "word_embedding_dimension": int(model.backbone.config.hidden_size),
                **{key: known == mode for key, known in POOLING_KEYS.items()},
            },
        )
        if config.projections:
            _write_projections(model.pooling, config.projections, folder)
        write_json(
            folder / "sentence_bert_config.json",
            {"max_seq_length": config.query_max_length, "do_lower_case": False},
        )
    else:
        places, types = [""], [_MODULE_CLASS]
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": place, "type": kind}
            for i, (place, kind) in enumerate(zip(places, types, strict=True))
        ],
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": _prompts(model, instructions),
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )


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


def _prompts(model: PooledTransformer, instructions: Mapping[str, str]) -> dict[str, str]:
    """What sentence-transformers puts before texts: of each role and each named instruction."""
    from rayembed.models.tokens import NVEmbedTokenizer

    tokenizer = model.tokenizer
    if isinstance(tokenizer, NVEmbedTokenizer):
        named = {name: tokenizer.head(text) for name, text in instructions.items()}
        return {"query": "", "document": ""} | named
    named = {name: tokenizer.head(text, "query") for name, text in instructions.items()}
    return {
        "query": tokenizer.head("", "query"),
        "document": tokenizer.head("", "document"),
    } | named


def read_settings(folder: Path, *, dtype: Dtype | None = None) -> ModelConfig:
    """The settings of a saved model.

    Raises:
        ArtifactError: not a settings file, or of a later format.
    """
    values = _read_settings_file(folder / SETTINGS_FILE)
    adapter: TypeAdapter[Any] = TypeAdapter(ModelConfig)
    try:
        config: NVEmbedConfig | BiEncoderConfig = adapter.validate_python(values.get("model"))
    except ValidationError as error:
        raise ArtifactError(f"settings in {str(folder)!r} do not hold: {error}") from error
    if dtype is None:
        return config
    backbone = config.backbone.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"backbone": backbone})


def saved_dimensions(settings_file: Path) -> tuple[int, ...]:
    """Widths of the vectors of a saved model, the full one first, without loading the model.

    Args:
        settings_file: the `rayembed.json` of the model's folder.

    Raises:
        ArtifactError: not a settings file, or of another format.
    """
    found = _read_settings_file(settings_file).get("dimensions")
    if not isinstance(found, list) or not found or not all(isinstance(d, int) for d in found):
        raise ArtifactError(
            f"{str(settings_file)!r} names no dimensions, found {found!r}; export the model again"
        )
    return tuple(found)


def _read_settings_file(path: Path) -> dict[str, Any]:
    values = read_json(path)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{str(path)!r} has format_version {version!r}; this version of "
            f"rayembed reads {FORMAT_VERSION}"
        )
    return values


def load_saved(folder: Path, *, dtype: Dtype | None = None) -> PooledTransformer:
    """The model that `save_model` wrote to the folder, in evaluation mode.

    Raises:
        ArtifactError: files are missing, damaged or do not fit each other.
    """
    from rayembed.models.build import assemble, make_tokenizer

    config = read_settings(folder, dtype=dtype)
    mask = config.mask if isinstance(config, NVEmbedConfig) else "own"
    backbone = load_backbone(folder, config.backbone, mask=mask)
    pooling = build_head(config, backbone.config.hidden_size)
    load_pooling(pooling, folder / POOLING_FILE)
    pooling.to(DTYPES[config.backbone.dtype])
    return assemble(config, backbone, pooling, make_tokenizer(config, folder)).eval()


def load_pooling(pooling: Any, path: Path) -> None:
    """Put saved weights into a pooling layer; one without weights has no file.

    Raises:
        ArtifactError: the file is missing, damaged or of another layer.
    """
    import safetensors
    import safetensors.torch

    if not pooling.state_dict():
        return
    try:
        state = safetensors.torch.load_file(path)
        pooling.load_state_dict(state)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot load the pooling layer {str(path)!r}: {error}") from error
