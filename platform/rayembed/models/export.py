"""A model's own folder: written atomically, read back to the same vectors.

transformers format for the (merged) backbone and the tokenizer, the same in `encoder/` for an
encoder beside it, `pooling.safetensors` for what is trained from random weights, `rayembed.json`
for the settings, `corpus.safetensors` for a corpus's context vectors, `modules.json` for
sentence-transformers. A bi-encoder with one maximum length is plain sentence-transformers format,
so that it loads where rayembed is not installed; other models name `SentenceModule`.
"""

import copy
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from rayembed.assets.finite import check_finite_files
from rayembed.assets.sentence_modules import OWN_MODULE
from rayembed.config.model import (
    BiEncoderConfig,
    Causal2VecConfig,
    CDEConfig,
    Dtype,
    ModelConfig,
    NomicMoeConfig,
    ProjectionConfig,
    has_plain_format,
    pretrained_parts,
    without_place,
)
from rayembed.errors import ArtifactError
from rayembed.models.backbones import torch_dtype
from rayembed.models.causal2vec_tokens import Causal2VecTokenizer
from rayembed.models.cde import CDE
from rayembed.models.contract import Role, settings_of
from rayembed.models.corpus import CORPUS_FILE, load_corpus, save_corpus
from rayembed.models.json_file import read_json, write_json
from rayembed.models.lora import merged_state
from rayembed.models.sentence_folder import ACTIVATIONS, POOLING_KEYS, mode_of
from rayembed.models.transformer_model import TransformerModel

SETTINGS_FILE = "rayembed.json"
POOLING_FILE = "pooling.safetensors"
ENCODER_FOLDER = "encoder"
FORMAT_VERSION = 1

SYMMETRIC_TYPES = (
    "BitextMining",
    "Classification",
    "Clustering",
    "MultilabelClassification",
    "PairClassification",
    "Regression",
    "STS",
    "Summarization",
)
"""mteb's symmetric task types, whose texts are neither queries nor documents."""


def save_model(
    model: TransformerModel, folder: Path, *, instructions: Mapping[str, str] | None = None
) -> None:
    """Save the model atomically: to a temporary folder that is then renamed.

    An older model in the folder is replaced.

    Raises:
        ArtifactError: the folder holds something else than a model of rayembed, or a weight is not
            finite; the folder stays as it is.
    """
    folder = check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        written = temporary / "model"
        written.mkdir()
        write_files(model, written, instructions=instructions)
        check_finite_files(written)
        if folder.exists():
            folder.rename(temporary / "replaced")
        written.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(folder: Path) -> Path:
    """Absolute path of the folder, after checking that a model may be saved to it.

    Raises:
        ArtifactError: it holds something else than a model of rayembed.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"cannot save to {str(folder)!r}: it is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SETTINGS_FILE).is_file():
        raise ArtifactError(
            f"cannot save to {str(folder)!r}: it holds files of something else; name a new folder"
        )
    return folder


def write_files(
    model: TransformerModel, folder: Path, *, instructions: Mapping[str, str] | None = None
) -> None:
    """Write the files of a model into an existing folder."""
    import safetensors.torch

    for name, part in model.parts.items():
        place = folder if name == "backbone" else folder / name
        part.save_pretrained(str(place), state_dict=merged_state(part))
    head = {name: value.contiguous() for name, value in model.head.state_dict().items()}
    if head:
        safetensors.torch.save_file(head, folder / POOLING_FILE)
    _padding_tokenizer(model).save_pretrained(str(folder))
    if isinstance(model.tokenizer, Causal2VecTokenizer) and model.tokenizer.encoder is not None:
        model.tokenizer.encoder.pretrained.save_pretrained(str(folder / ENCODER_FOLDER))
    if isinstance(model, CDE):
        model.tokenizer.pretrained.save_pretrained(str(folder / ENCODER_FOLDER))
        if model.corpus is not None and len(model.corpus):
            save_corpus(model.corpus, folder)
        else:
            (folder / CORPUS_FILE).unlink(missing_ok=True)
    settings = settings_of(_without_adapters(model.config))
    told = dict(model.default_instructions)
    for name, reference in pretrained_parts(model.config).items():
        settings[name]["path"] = without_place(reference)
    write_json(
        folder / SETTINGS_FILE,
        {
            "format_version": FORMAT_VERSION,
            "model": settings,
            "dimensions": list(model.dimensions),
            **({"default_instructions": told} if told else {}),
        },
    )
    _write_sentence_files(model, folder, instructions or {})
    for path in folder.rglob("*"):
        if path.is_file():
            os.chmod(path, 0o644)  # noqa: PTH101


def _without_adapters(config: ModelConfig) -> ModelConfig:
    """Settings of a model whose adapters have been merged into its weights."""
    if isinstance(config, Causal2VecConfig) and config.encoder is not None:
        merged = config.encoder.model_copy(update={"lora": None})
        return config.model_copy(update={"lora": None, "encoder": merged})
    if isinstance(config, NomicMoeConfig):
        return config
    return config.model_copy(update={"lora": None})


def encoder_folder(config: ModelConfig, folder: Path) -> Path | None:
    """Folder of a saved model's encoder; None if it has none."""
    beside = isinstance(config, Causal2VecConfig | CDEConfig) and config.encoder is not None
    return folder / ENCODER_FOLDER if beside else None


def _padding_tokenizer(model: TransformerModel) -> Any:
    """Tokenizer of transformers; a bi-encoder's pads with EOS if it has no padding token.

    sentence-transformers would not make a batch otherwise; what is padding stands in the mask.
    """
    pretrained = model.tokenizer.pretrained
    if pretrained.pad_token is None and isinstance(model.config, BiEncoderConfig):
        pretrained = copy.deepcopy(pretrained)
        pretrained.pad_token = pretrained.eos_token
    return pretrained


def _write_sentence_files(
    model: TransformerModel, folder: Path, instructions: Mapping[str, str]
) -> None:
    config = model.config
    if isinstance(config, BiEncoderConfig) and has_plain_format(config):
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
            _write_projections(model.head, config.projections, folder)
        write_json(
            folder / "sentence_bert_config.json",
            {"max_seq_length": config.query_max_length, "do_lower_case": False},
        )
    else:
        places, types = [""], [OWN_MODULE]
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


def _prompts(model: TransformerModel, instructions: Mapping[str, str]) -> dict[str, str]:
    """Prompts for sentence-transformers and mteb: by role, task and task type.

    mteb asks for a task, then for its type, then for the role; what a task has no sides for has no
    role. With a prefix of queries the types of such tasks name it, so that mteb gives their texts
    the prefix that they have here. A bare name would hit documents too, which have their own.
    """
    tokenizer = model.tokenizer
    roles: tuple[Role, ...] = ("query", "document")
    by_role: dict[str, str] = {
        role: tokenizer.prompt(model.instruction_of(role, None), role) for role in roles
    }
    prefix = tokenizer.prompt("", "query")
    named = {name: tokenizer.prompt(text, "query") for name, text in instructions.items()}
    types = dict.fromkeys(SYMMETRIC_TYPES, prefix) if prefix else {}
    documents = {
        _of_documents(name): by_role["document"]
        for name, prompt in {**types, **named}.items()
        if prompt != by_role["document"]
    }
    return {**by_role, **types, **documents, **named}


def _of_documents(name: str) -> str:
    """Mteb's name of the prompt for documents of a task or task type."""
    return f"{name}-document"


def saved_prompts(folder: Path) -> dict[str, str]:
    """Literal prompts of a saved model, by data set and task names only."""
    path = folder / "config_sentence_transformers.json"
    stated = read_json(path) if path.is_file() else {}
    prompts: dict[str, str | None] = stated.get("prompts") or {}
    others = {"query", "document", *SYMMETRIC_TYPES, *map(_of_documents, prompts)}
    return {name: text or "" for name, text in prompts.items() if name not in others}


def saved_instructions(folder: Path, template: str) -> dict[str, str]:
    """Task instructions by name, stored in the folder as prompts for sentence-transformers.

    Args:
        template: the model's `instruction_template`, which made the prompts of them.
    """
    before, _, behind = template.partition("{instruction}")
    return {
        name: prompt.removeprefix(before).removesuffix(behind)
        for name, prompt in saved_prompts(folder).items()
        if prompt
    }


def read_settings(folder: Path, *, dtype: Dtype | None = None) -> ModelConfig:
    """Settings of a saved model.

    Raises:
        ArtifactError: not a settings file, or of a later format.
    """
    values = _read_settings_file(folder / SETTINGS_FILE)
    adapter: TypeAdapter[Any] = TypeAdapter(ModelConfig)
    try:
        config: ModelConfig = adapter.validate_python(values.get("model"))
    except ValidationError as error:
        raise ArtifactError(f"settings in {str(folder)!r} do not hold: {error}") from error
    if dtype is None:
        return config
    backbone = config.backbone.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"backbone": backbone})


def saved_dimensions(settings_file: Path) -> tuple[int, ...]:
    """Vector widths of a saved model, the full one first, without loading the model.

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


def load_saved(folder: Path, *, dtype: Dtype | None = None) -> TransformerModel:
    """Load a model written by `save_model`, in evaluation mode.

    Raises:
        ArtifactError: files are missing, damaged or do not fit each other.
    """
    from rayembed.models.build import assemble, build_head, load_encoder, load_main, make_tokenizer

    config = read_settings(folder, dtype=dtype)
    backbone = load_main(folder, config)
    beside = encoder_folder(config, folder)
    encoder = None if beside is None else load_encoder(config, beside)
    head = build_head(config, backbone.config, encoder and encoder.config)
    load_pooling(head, folder / POOLING_FILE)
    head.to(torch_dtype(config.backbone.dtype))
    tokenizer = make_tokenizer(config, folder, beside)
    model = assemble(config, backbone, encoder, head, tokenizer).eval()
    if isinstance(model, CDE):
        model.set_corpus(load_corpus(folder))
    told = _read_settings_file(folder / SETTINGS_FILE).get("default_instructions") or {}
    model.default_instructions = {role: str(told[role]) for role in get_args(Role) if role in told}
    return model


def load_pooling(pooling: Any, path: Path) -> None:
    """Load saved weights into a model's head; a head without weights has no file.

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
        raise ArtifactError(f"cannot load the head {str(path)!r}: {error}") from error
