"""Load a model folder: one that rayembed saved, one in a published layout, or a common encoder
format.
"""

from pathlib import Path
from typing import Literal, get_args

import torch

from rayembed.assets.folder_formats import format_of
from rayembed.config.backbone import Dtype, DtypeSetting, Tf32
from rayembed.config.model import ModelConfig
from rayembed.config.types import Role
from rayembed.errors import ArtifactError
from rayembed.machine.hardware import Precision, auto_precision, settled, wide_enough
from rayembed.models.architecture import Published, architecture_of, architectures
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.backbones import torch_dtype
from rayembed.models.loading.build import check_buildable, empty_around, empty_parts, shapes_of
from rayembed.models.loading.files import read_json
from rayembed.models.loading.saved_folder import (
    POOLING_FILE,
    SETTINGS_FILE,
    default_instructions,
    load_head,
    part_folders,
    read_settings,
    saved_dimensions,
)
from rayembed.models.loading.sentence_folder import Stated, check_default_prompt, read_stated
from rayembed.models.passes.fitting import room_for
from rayembed.models.transformer_model import TransformerModel
from rayembed.models.vocabulary import check_vocabulary, check_words


def load_model(
    folder: str | Path, *, dtype: Dtype | None = None, device: str | torch.device = "cpu"
) -> TransformerModel:
    """Load the model in a folder, in evaluation mode, to embed texts.

    The folder is one that `save` wrote, a copy of what an architecture's authors have published, or
    an encoder in sentence-transformers format (transformer, pooling by one mode, Dense and
    Normalize modules) or in transformers format (taken with mean pooling). A decoder keeps its
    causal mask. Embeddings are always of unit length.

    Args:
        dtype: of weights and activations; None: what `computed_dtype` gives for the device. A
            folder of a format of its own keeps its types.
        device: that computes, such as `cuda:1`. Graphs of a CPU runtime stay on the CPU.

    Raises:
        ArtifactError: nothing of the kind, damaged, or with parts that are not supported.
        ConfigError: a folder of a format that nothing here reads.
        DeviceMemoryError: the device has no room for it.
    """
    folder = Path(folder)
    _check_is_model(folder)
    model: TransformerModel
    if (own := format_of(folder)) is not None:
        _check_saved(folder)
        model = own.load(folder)
        return model
    dtype = dtype or computed_dtype(folder, on=str(device))
    if (folder / SETTINGS_FILE).is_file():
        _check_saved(folder)
        model = load_saved(folder, dtype=dtype)
    else:
        model = published(folder).load(dtype)
        check_words(model)
    with room_for(f"the model {str(folder)!r}"):
        return model.to(device)


def load_as_saved(folder: Path) -> TransformerModel:
    """Load a model in the number type of its saved weights, for a caller that will cast it, to save
    memory.

    As `load_model` in the type of `saved_dtype`, but weights saved in float16 come in that, in
    which no model of ours computes.

    Raises:
        ArtifactError: as `load_model`.
    """
    dtype = saved_dtype(folder)
    if dtype == "float32" and not (folder / SETTINGS_FILE).is_file():
        found: TransformerModel | None = published(folder).in_float16()
        if found is not None:
            return found
    return load_model(folder, dtype=dtype)


def load_saved(folder: Path, *, dtype: Dtype | None = None) -> TransformerModel:
    """Load a model written by `TransformerModel.save`, in evaluation mode.

    Raises:
        ArtifactError: files are missing, damaged or do not fit each other.
    """
    config = read_settings(folder, dtype=dtype)
    architecture = architecture_of(config)
    folders = part_folders(config, folder)
    parts = {name: architecture.load_part(config, name, at) for name, at in folders.items()}
    architecture.check_parts(config, parts, folders)
    with torch.device("meta"):
        head = architecture.build_head(config, shapes_of(parts))
    load_head(head, folder / POOLING_FILE, torch_dtype(config.backbone.dtype))
    tokenizer = architecture.tokenizer(config, folders)
    model: TransformerModel = architecture.assemble(config, parts, head, tokenizer).eval()
    check_words(model)
    architecture.read_more(model, folder)
    model.default_instructions = default_instructions(folder)
    return model


def published(folder: Path) -> Published:
    """Describe the model in a folder that rayembed did not write, by the first architecture that
    reads it.

    Raises:
        ArtifactError: nothing that any architecture reads.
    """
    asked = (architecture.published(folder) for architecture in architectures())
    found = next((found for found in asked if found is not None), None)
    if found is None:
        raise ArtifactError(f"no architecture can read the model in {str(folder)!r}")
    if (folder / "modules.json").is_file():
        _check_stated(folder, found.config)
    return found


def _check_saved(folder: Path) -> None:
    """Raise if a saved model's files for sentence-transformers contradict its
    rayembed.json.

    Both are written at once, and sentence-transformers reads its own alone.
    """
    config = read_settings(folder)
    if not (folder / "modules.json").is_file():
        return
    stated = _check_stated(folder, config)
    defaults = default_instructions(folder)
    for role in get_args(Role):
        prompt = config.prompt(defaults.get(role, ""), role)
        if stated.prompts.get(role, prompt) != prompt:
            raise ArtifactError(
                f"config_sentence_transformers.json in {str(folder)!r} has the prompt "
                f"{stated.prompts[role]!r} of {role} texts, but {SETTINGS_FILE} has {prompt!r}; "
                "one of them was changed: export the model again, or make both the same"
            )
    architecture_of(config).check_sentence_files(config, folder)


def _check_stated(folder: Path, config: ModelConfig) -> Stated:
    """Read config_sentence_transformers.json; raise if its prompt or width contradicts the model's
    settings.
    """
    stated = read_stated(folder)
    check_default_prompt(folder, stated, config.prompt("", "document"))
    width: int | None = getattr(config, "width", None)
    if stated.width not in (None, width):
        raise ArtifactError(
            f"config_sentence_transformers.json in {str(folder)!r} has truncate_dim={stated.width},"
            f" but the model's vectors are {'whole' if width is None else f'{width} wide'}; set "
            "truncate_dim to null, and name the width where vectors are used (`dimensions`)"
        )
    return stated


def computed_dtype(
    folder: Path,
    asked: DtypeSetting | Tf32 | Literal["saved"] = "auto",
    on: Precision | str | None = None,
) -> Dtype:
    """Return the number type in which to run a saved model; loading, serving and scoring all use
    this.

    Args:
        asked: `auto`: as saved (float16 becomes float32), but float32 where bfloat16 is emulated.
            `saved`: as saved, whatever computes. `tf32`: float32. Else this type.
        on: what will compute, as in `hardware.settled`.

    Raises:
        ArtifactError: as `load_model`, as far as settings tell.
    """
    if asked == "auto":
        return wide_enough(saved_dtype(folder), on)
    if asked == "tf32":
        return "float32"
    return saved_dtype(folder) if asked == "saved" else settled(asked, on)


def saved_dtype(folder: Path) -> Dtype:
    """Return the number type of the saved weights; float32 for weights saved as float16.

    Reads JSON alone; of a folder that states none the first weight's header. `auto`, which settings
    written by hand may have, is what this machine computes fast.

    Raises:
        ArtifactError: as `load_model`, as far as settings tell.
    """
    saved = settings_of(folder).backbone.dtype
    return auto_precision().dtype if saved == "auto" else saved


def settings_of(folder: Path) -> ModelConfig:
    """Read the settings of the model in a folder, without its weights.

    Raises:
        ArtifactError: as `load_model`, as far as settings tell.
    """
    _check_is_model(folder)
    own = (folder / SETTINGS_FILE).is_file()
    return read_settings(folder) if own else published(folder).config


def saved_widths(folder: Path) -> tuple[int, ...]:
    """Return the widths to which the model's vectors may be truncated, the full width first;
    weights are not read.

    Raises:
        ArtifactError: as `load_model`, as far as settings tell.
    """
    _check_is_model(folder)
    if (folder / SETTINGS_FILE).is_file():
        return saved_dimensions(folder / SETTINGS_FILE)
    found = published(folder)
    return (found.width(), *(found.config.offered_dimensions or ()))


def check_loadable(folder: Path, *, embeds: bool = True) -> ModelConfig:
    """Check from its files that `load_model` can load the model; return its settings.

    Architecture, pooling and tokenizer are known, and there are weights, which are not read.

    Args:
        embeds: whether a model that gives no vectors is refused.

    Raises:
        ArtifactError: as `load_model`, or the model gives no vectors.
    """
    _check_is_model(folder)
    if (folder / SETTINGS_FILE).is_file():
        _check_saved(folder)
        config = read_settings(folder)
        folders = part_folders(config, folder)
        if (own := format_of(folder)) is not None:
            own.check(folder)
            architecture_of(config).tokenizer(config, folders)
            return config
        for name, at in folders.items():
            architecture_of(config).check_part(config, name, at)
        if config.has_head and not (folder / POOLING_FILE).is_file():
            raise ArtifactError(
                f"the model in {str(folder)!r} is incomplete: the file {POOLING_FILE} is missing, "
                "which holds the weights of the model's head; copy or export the folder again"
            )
    else:
        found = published(folder)
        config, folders = found.config, {"backbone": found.transformer}
        found.check()
    if embeds and not config.embeds:
        raise ArtifactError(
            f"the model in {str(folder)!r} is of the kind {config.kind!r}: it scores pairs of "
            "query and document and gives no vectors, so it is no embedding model; use it as a "
            "reranker (rayembed evaluate --reranker, data.datasets.NAME.mining.rescoring.model)"
        )
    tokenizer = architecture_of(config).tokenizer(config, folders)
    stated = read_json(folders["backbone"] / "config.json")
    words = (stated.get("text_config") or stated).get("vocab_size")
    if isinstance(words, int):
        check_vocabulary(tokenizer.pretrained, words, f"the model in {str(folder)!r}")
    for at in folders.values():
        if not any(path.suffix in (".safetensors", ".bin") for path in at.iterdir()):
            raise ArtifactError(
                f"no weights in {str(at)!r}; expected *.safetensors or pytorch_model.bin"
            )
    return config


def tokenizer_of(folder: Path) -> PromptTokenizer:
    """Load the tokenizer of the model in a folder; no weights are read.

    Raises:
        ArtifactError: as `load_model`, as far as settings and the tokenizer's files tell.
    """
    _check_is_model(folder)
    if (folder / SETTINGS_FILE).is_file():
        config = read_settings(folder)
        folders = part_folders(config, folder)
    else:
        found = published(folder)
        config, folders = found.config, {"backbone": found.transformer}
    tokenizer: PromptTokenizer = architecture_of(config).tokenizer(config, folders)
    return tokenizer


def empty_model(folder: Path) -> TransformerModel:
    """Build a folder's model on the meta device; models in a publisher's own layout are loaded with
    their weights.

    Raises:
        ArtifactError: no model that can be loaded.
    """
    config = check_loadable(folder)
    architecture = architecture_of(config)
    if not (folder / SETTINGS_FILE).is_file():
        if architecture.takes_any_encoder:
            return check_buildable(config, dict.fromkeys(config.parts, folder))
        return load_model(folder, dtype=saved_dtype(folder))
    folders = part_folders(config, folder)
    tokenizer = architecture.tokenizer(config, folders)
    return empty_around(config, empty_parts(config, folders), tokenizer)


def _check_is_model(folder: Path) -> None:
    if not any((folder / n).is_file() for n in (SETTINGS_FILE, "modules.json", "config.json")):
        raise ArtifactError(
            f"no model in {str(folder)!r}: neither {SETTINGS_FILE}, modules.json nor config.json"
        )
