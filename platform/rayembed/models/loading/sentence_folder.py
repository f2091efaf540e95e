"""Read folders in sentence-transformers format: their modules and settings."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from rayembed.assets.names import below
from rayembed.config.backbone import (
    ClsPooling,
    Dtype,
    EosPooling,
    MaxPooling,
    MeanPooling,
    PlainPooling,
    ProjectionConfig,
    WeightedMeanPooling,
)
from rayembed.errors import ArtifactError
from rayembed.models.loading.files import (
    load_weights,
    read_header,
    read_json,
    read_json_value,
    weight_paths,
)
from rayembed.models.loading.saved_prompts import sentence_settings

Activation = Literal["identity", "tanh", "relu", "gelu"]

ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}
"""Supported activation classes of a Dense module."""

POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling modes by the keys that denoted them before version 6 and may still occur."""

_SQRT = "mean_sqrt_len_tokens"
_POOLING: dict[str, PlainPooling] = {
    "cls": ClsPooling(),
    "max": MaxPooling(),
    "mean": MeanPooling(),
    "weightedmean": WeightedMeanPooling(),
    "lasttoken": EosPooling(),
    _SQRT: MeanPooling(),
}
_OF_TRANSFORMER: dict[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({}, None),
    "query_expansion": (None,),
    "query_length": (None,),
    "document_length": (None,),
    "model_args": ({},),
    "model_kwargs": ({},),
    "tokenizer_args": ({},),
    "processor_kwargs": ({},),
    "config_args": ({},),
    "config_kwargs": ({},),
    "do_lower_case": (False, None, True),
}
"""Settings of a Transformer module that change vectors, with the values that are supported."""
_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files of a Transformer module's settings; sentence-transformers reads the first that has any."""
_FEATURES = ("module_input_name", "module_output_name")
_PLAIN_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
_STATED = (
    "prompts",
    "default_prompt_name",
    "similarity_fn_name",
    "truncate_dim",
    "model_type",
    "__version__",
    "requirements",
)
"""Settings of config_sentence_transformers.json; the last two decide no vector."""
_ADVICE = "evaluate the model unchanged by the reference `st:` and its path, or change the file"


class Modules(NamedTuple):
    """Settings of the modules in a folder of sentence-transformers: transformer, pooling,
    projections.
    """

    transformer: Path
    pooling: PlainPooling
    projections: tuple[ProjectionConfig, ...]
    dense: tuple[Path, ...]
    normalized: bool
    max_length: int | None
    """Tokens of a text as the Transformer module states them."""


class Stated(NamedTuple):
    """Settings in a folder's config_sentence_transformers.json that affect vectors."""

    prompts: Mapping[str, str]
    default_prompt: str
    """Prompt of texts that are encoded without a role."""
    similarity: str | None
    width: int | None
    """Width to which vectors are truncated; None: they are not."""


def load_projections(head: nn.Module, files: Sequence[Path]) -> None:
    """Load the weights of Dense modules into the projections of a model's head.

    Raises:
        ArtifactError: a file is damaged, or has other weights than its settings say.
    """
    for path, projection in zip(files, getattr(head, "projections", ()), strict=True):
        try:
            projection.load_state_dict(load_weights(path))
        except (ArtifactError, RuntimeError) as error:
            raise ArtifactError(f"cannot load the Dense module {str(path)!r}: {error}") from error


def _dense_weights(folder: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise ArtifactError(f"no weights in {str(folder)!r}: expected model.safetensors")


def read_modules(folder: Path) -> Modules:
    """Read the modules in `modules.json`: a transformer, pooling and projections.

    Raises:
        ArtifactError: others, or settings of them by which a bi-encoder would give other vectors.
    """
    modules = read_json_value(folder / "modules.json")
    _check_entries(folder / "modules.json", modules)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    own = all(module["type"].startswith("sentence_transformers.") for module in modules)
    normalized = kinds[-1:] == ["Normalize"]
    middle = kinds[2 : len(kinds) - normalized]
    if not own or kinds[:2] != ["Transformer", "Pooling"] or set(middle) - {"Dense"}:
        raise ArtifactError(
            f"{str(folder)!r} consists of the modules {[m['type'] for m in modules]}; supported "
            "are Transformer, Pooling, any number of Dense and Normalize of "
            "sentence-transformers, in this order"
        )
    listed = f"{str(folder / 'modules.json')!r}"
    paths = [
        below(folder, module["path"], listed) if module["path"] else folder for module in modules
    ]
    dense = paths[2 : len(paths) - normalized]
    if normalized and (paths[-1] / "config.json").is_file():
        _check_feature(paths[-1] / "config.json", read_json(paths[-1] / "config.json"))
    pooling = _read_pooling(paths[1] / "config.json", projected=bool(dense))
    projections = tuple(_read_dense(path / "config.json") for path in dense)
    weights = tuple(map(_dense_weights, dense))
    length = _read_transformer(paths[0])
    return Modules(paths[0], pooling, projections, weights, normalized, length)


def _check_entries(path: Path, modules: Any) -> None:
    """Raise if modules.json is malformed, has unknown entries, or has two modules with the same
    name.

    It keeps one module of each name, and hands `kwargs` to the modules' passes.
    """
    right = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not right or not all(
        isinstance(module.get(key), str) for module in modules for key in ("path", "type")
    ):
        raise ArtifactError(f"{str(path)!r} must be a list of modules, each with path and type")
    for module in modules:
        check_known(path, module, ("idx", "name", "path", "type"))
    names = [module["name"] for module in modules if "name" in module]
    if len(set(names)) < len(names):
        raise ArtifactError(
            f"{str(path)!r} has two modules with the same name; the names are {names}"
        )


def read_stated(folder: Path) -> Stated:
    """Read the settings of config_sentence_transformers.json that affect vectors; return defaults
    if the file is missing.

    Raises:
        ArtifactError: settings of other types than these have, or unknown ones.
    """
    path = folder / "config_sentence_transformers.json"
    stated = sentence_settings(folder)
    check_known(path, stated, _STATED)
    if (kind := stated.get("model_type")) not in (None, "SentenceTransformer"):
        raise ArtifactError(
            f"{str(path)!r} has model_type={kind!r}, but only 'SentenceTransformer', with one "
            "dense vector for each text, is supported"
        )
    prompts = stated.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise ArtifactError(f"{str(path)!r} has prompts={prompts!r}; it must map names to texts")
    default = stated.get("default_prompt_name")
    if default is not None and default not in {"query", "document", *prompts}:
        raise ArtifactError(
            f"{str(path)!r} has default_prompt_name={default!r}, which is not one of its prompts, "
            f"{sorted(prompts)}"
        )
    width = stated.get("truncate_dim")
    if width is not None and (type(width) is not int or width < 1):
        raise ArtifactError(
            f"{str(path)!r} has truncate_dim={width!r}; supported are whole numbers of at least "
            "1, and null for vectors of full width"
        )
    texts = {name: text or "" for name, text in prompts.items()}
    return Stated(texts, texts.get(default, ""), stated.get("similarity_fn_name"), width)


def check_default_prompt(folder: Path, stated: Stated, document: str) -> None:
    """Raise if sentence-transformers would put a default prompt before texts that differs from the
    documents' prompt.

    sentence-transformers' `encode` puts it before each text, its `encode_query` and
    `encode_document` before none. Here every text has a role, which is `document` unless named.

    Args:
        document: prompt of documents.
    """
    if stated.default_prompt not in ("", document):
        raise ArtifactError(
            f"{str(folder / 'config_sentence_transformers.json')!r} has a default_prompt_name "
            f"with the prompt {stated.default_prompt!r} for texts without a role, but rayembed "
            f"embeds these as documents, with the prompt {document!r}: "
            f"{_ADVICE} to default_prompt_name=null"
        )


def check_known(path: Path, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise if a settings file has a value for a key that rayembed does not know.

    Raises:
        ArtifactError: one that may change vectors, by its name.
    """
    unknown = sorted(k for k, v in settings.items() if k not in known and v not in (None, {}, []))
    if unknown:
        raise ArtifactError(
            f"{str(path)!r} has {unknown[0]}={settings[unknown[0]]!r}, which may change vectors "
            f"and is not supported; supported settings are {', '.join(known)}: {_ADVICE}"
        )


def mode_of(pooling: PlainPooling) -> str:
    """Return the name that sentence-transformers has for a pooling."""
    return next(mode for mode, known in _POOLING.items() if known == pooling)


def _read_pooling(path: Path, *, projected: bool) -> PlainPooling:
    settings = read_json(path)
    known = ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt")
    check_known(path, settings, (*known, *POOLING_KEYS))
    modes: Any = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in POOLING_KEYS.items() if settings.get(key)] or "mean"
    modes = modes if isinstance(modes, list) else [modes]
    prompt = settings.get("include_prompt", True)
    pooling = _POOLING.get(str(modes[0])) if len(modes) == 1 else None
    # The last token is the same with the prompt and without. A mean over the square root of the
    # length has the mean's direction, which is all that is left where no Dense follows.
    if (
        pooling is None
        or not (prompt or isinstance(pooling, EosPooling))
        or (projected and modes == [_SQRT])
    ):
        raise ArtifactError(
            f"{str(path)!r} pools by {modes} (pooling_mode) with include_prompt={prompt}"
            f"{', followed by a Dense' if projected else ''}; supported is exactly one of "
            f"{list(_POOLING)}. include_prompt must be true except for lasttoken, and no Dense may "
            f"follow {_SQRT!r}"
        )
    return pooling


def _read_dense(path: Path) -> ProjectionConfig:
    settings = read_json(path)
    sizes = ("in_features", "out_features", "bias", "activation_function", "use_residual")
    check_known(path, settings, (*sizes, *_FEATURES))
    _check_feature(path, settings)
    # Tanh where none is named, as sentence-transformers has it.
    activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS or settings.get("use_residual", False):
        raise ArtifactError(
            f"{str(path)!r} has activation_function={activation!r} and "
            f"use_residual={settings.get('use_residual', False)}; supported are "
            f"{sorted(ACTIVATIONS)} without residual"
        )
    return ProjectionConfig(
        width=settings["out_features"],
        bias=settings.get("bias", True),
        activation=ACTIVATIONS[activation],
    )


def _check_feature(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise for a module whose input or output is not the text's vector."""
    for key in _FEATURES:
        if settings.get(key) not in (None, "sentence_embedding"):
            raise ArtifactError(
                f"{str(path)!r} has {key}={settings[key]!r}, but only 'sentence_embedding' is "
                "supported"
            )


def _read_transformer(folder: Path) -> int | None:
    """Check the settings of the Transformer module, and return its maximum text length.

    Raises:
        ArtifactError: settings of it that would change the vectors.
    """
    path, settings = _transformer_settings(folder)
    known = ("max_seq_length", "modality_config", "unpad_inputs", *_OF_TRANSFORMER)
    check_known(path, settings, known)
    for key, harmless in _OF_TRANSFORMER.items():
        if key in settings and settings[key] not in harmless:
            raise ArtifactError(
                f"{str(path)!r} has {key}={settings[key]!r}, but only {harmless[0]!r} is supported"
            )
    modalities = settings.get("modality_config") or {"text": _PLAIN_TEXT}
    if "message" in modalities:
        raise ArtifactError(
            f"{str(path)!r} puts texts into a chat template (modality_config has 'message'), but "
            "only plain text is supported"
        )
    text = dict(modalities.get("text") or {})
    if text.get("method_output_name") == ["last_hidden_state"]:
        text["method_output_name"] = "last_hidden_state"
    if text != _PLAIN_TEXT:
        raise ArtifactError(
            f"{str(path)!r} has modality_config={modalities!r}, but only {_PLAIN_TEXT} is "
            "supported for text"
        )
    length = settings.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ArtifactError(
            f"{str(path)!r} has max_seq_length={length!r}; supported are whole numbers of at "
            "least 1"
        )
    return length


def _transformer_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    paths = [folder / name for name in _TRANSFORMER_FILES if (folder / name).is_file()]
    path = next((path for path in paths if read_json(path)), folder / _TRANSFORMER_FILES[0])
    return path, read_json(path) if path.is_file() else {}


def states_lower_case(folder: Path) -> bool:
    """Whether a folder's Transformer module is set to lower-case texts.

    Without modules.json, of the folder or of the one above, sentence-transformers does not read it.
    """
    listed = any((place / "modules.json").is_file() for place in (folder, folder.parent))
    return listed and bool(_transformer_settings(folder)[1].get("do_lower_case"))


def stated_dtype(transformer: Path) -> Dtype:
    """Return the number type of a folder's weights: bfloat16 if config.json (or, without an entry,
    the first weight) is bfloat16; else float32.
    """
    config = read_json(transformer / "config.json")
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is None:
        headers = map(read_header, weight_paths(transformer))
        stated = next((tensor["dtype"] for read in headers for tensor in read.values()), None)
    return "bfloat16" if stated in ("BF16", "bfloat16") else "float32"
