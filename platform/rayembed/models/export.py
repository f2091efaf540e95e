"""A model's own folder: written atomically, read back to the same vectors.

transformers format in `backbone/` for the (merged) backbone and its tokenizer, the same in
`encoder/` for an encoder beside it, `pooling.safetensors` for what is trained from random weights,
`rayembed.json` for the settings, `corpus.safetensors` for a corpus's context vectors,
`modules.json` for sentence-transformers. A bi-encoder is plain sentence-transformers format, its
backbone in the folder itself, so that it loads where rayembed is not installed. Other models name
`SentenceModule`, and a config.json whose `model_type` transformers does not know: `AutoModel` would
load the backbone without what stands around it.
"""

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.assets.finite import check_finite_files
from rayembed.assets.room import room_for
from rayembed.assets.sentence_modules import OWN_MODULE
from rayembed.config.graph import GraphConfig
from rayembed.config.model import without_place
from rayembed.errors import ArtifactError
from rayembed.models.architecture import SentenceModule, architecture_of
from rayembed.models.backbones import check_not_quantised
from rayembed.models.contract import settings_of
from rayembed.models.files import write_json
from rayembed.models.lora import merged_state
from rayembed.models.saved_folder import (
    FORMAT_VERSION,
    MODEL_TYPE,
    POOLING_FILE,
    SETTINGS_FILE,
    part_folder,
)
from rayembed.models.saved_prompts import prompts_to_save
from rayembed.models.tokens import save_tokenizer

if TYPE_CHECKING:
    from rayembed.models.transformer_model import TransformerModel


def save_model(
    model: "TransformerModel", folder: Path, *, instructions: Mapping[str, str] | None = None
) -> None:
    """Save the model atomically: to a temporary folder that is then renamed.

    An older model in the folder is replaced.

    Raises:
        ArtifactError: the folder holds something else than a model of rayembed, or a weight is not
            finite, or what the model gives for a text; the folder stays as it is.
        ConfigError: the model is quantised.
        StorageFullError: there is no room for it; the folder stays as it is.
    """
    check_not_quantised(model.parts)
    with new_folder(folder) as written:
        written.mkdir()
        write_files(model, written, instructions=instructions)
        check_finite_files(written)
        model.check_passes(f"the model {str(folder)!r}")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A path to write a model to, which becomes `output` at the end, or vanishes after an error.

    Raises:
        ArtifactError: the folder `output` holds something else than a model of rayembed.
        StorageFullError: there is no room for the model.
    """
    output = check_target(output)
    with room_for(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            yield temporary / "model"
            if output.exists():
                output.rename(temporary / "replaced")
            (temporary / "model").rename(output)
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
    model: "TransformerModel", folder: Path, *, instructions: Mapping[str, str] | None = None
) -> None:
    """Write the files of a model into an existing folder."""
    import safetensors.torch

    if not model.config.has_plain_format:
        (folder / "backbone").mkdir(exist_ok=True)
        write_json(folder / "config.json", {"model_type": MODEL_TYPE, "kind": model.config.kind})
    for name, part in model.parts.items():
        part.save_pretrained(str(part_folder(folder, name)), state_dict=merged_state(part))
    head = {name: value.contiguous() for name, value in model.head.state_dict().items()}
    if head:
        safetensors.torch.save_file(head, folder / POOLING_FILE)
    for name, pretrained in model.part_tokenizers.items():
        tokenizer = _padding_tokenizer(model) if name == "backbone" else pretrained
        save_tokenizer(tokenizer, part_folder(folder, name))
    architecture_of(model.config).write_more(model, folder)
    _write_settings(model, folder)
    modules = architecture_of(model.config).write_sentence_files(model, folder)
    _write_sentence_files(model, modules, folder, instructions or {})
    _let_all_read(folder)


def write_graph_files(
    model: "TransformerModel",
    folder: Path,
    graph: GraphConfig,
    *,
    instructions: Mapping[str, str] | None = None,
) -> None:
    """Write all files of a model but its weights, in whose place graphs of a CPU runtime stand.

    Every architecture has the layout of those that need rayembed to load, bi-encoders too.

    Args:
        graph: how the graphs are run, which the caller writes.
    """
    architecture = architecture_of(model.config)
    write_json(folder / "config.json", {"model_type": MODEL_TYPE, "kind": model.config.kind})
    for name, part in model.parts.items():
        (folder / name).mkdir()
        architecture.write_part_settings(part, folder / name)
        save_tokenizer(model.part_tokenizers[name], folder / name)
    architecture.write_more(model, folder)
    _write_settings(model, folder, graph=settings_of(graph))
    _write_sentence_files(model, [SentenceModule("", OWN_MODULE)], folder, instructions or {})
    _let_all_read(folder)


def _write_settings(model: "TransformerModel", folder: Path, **more: Any) -> None:
    settings = settings_of(model.config.as_saved())
    told = dict(model.default_instructions)
    for name, reference in model.config.parts.items():
        settings[name]["path"] = without_place(reference)
    write_json(
        folder / SETTINGS_FILE,
        {
            "format_version": FORMAT_VERSION,
            "model": settings,
            "dimensions": list(model.dimensions),
            **({"default_instructions": told} if told else {}),
            **more,
        },
    )


def _let_all_read(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            os.chmod(path, 0o644)  # noqa: PTH101


def _padding_tokenizer(model: "TransformerModel") -> Any:
    """Tokenizer of transformers; one for sentence-transformers alone pads with EOS if it must, and
    cuts texts at their end.

    sentence-transformers would not make a batch otherwise; what is padding stands in the mask.
    """
    pretrained = model.part_tokenizers["backbone"]
    padded = pretrained.pad_token is not None
    if model.config.has_plain_format and not (padded and pretrained.truncation_side == "right"):
        pretrained = copy.deepcopy(pretrained)
        pretrained.truncation_side = "right"
        if not padded:
            pretrained.pad_token = pretrained.eos_token
    return pretrained


def _write_sentence_files(
    model: "TransformerModel",
    modules: Sequence[SentenceModule],
    folder: Path,
    instructions: Mapping[str, str],
) -> None:
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": module.path, "type": module.type}
            for i, module in enumerate(modules)
        ],
    )
    width: int | None = getattr(model.config, "width", None)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": prompts_to_save(model.config, instructions, model.default_instructions),
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            **({} if width is None else {"truncate_dim": width}),
        },
    )
