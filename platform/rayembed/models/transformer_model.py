"""Base classes of models built around a pretrained transformer, and how they are saved.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rayembed.assets.finite import check_finite_files
from rayembed.config.model import ModelConfig, without_place
from rayembed.models.adapters.lora import merged_state
from rayembed.models.architecture import ModuleEntry, architecture_of
from rayembed.models.attention.packed import token_states
from rayembed.models.attention.unpadded import why_part_padded
from rayembed.models.contract import EmbeddingModel, EmbedOutput, PromptTokenizer
from rayembed.models.layers import compile_layers
from rayembed.models.loading.backbones import check_not_quantised, first_position
from rayembed.models.loading.files import write_json
from rayembed.models.loading.saved_folder import (
    FORMAT_VERSION,
    MODEL_TYPE,
    POOLING_FILE,
    SETTINGS_FILE,
    part_folder,
)
from rayembed.models.loading.saved_prompts import prompts_to_save
from rayembed.models.passes.encoding import check_vectors
from rayembed.models.pooling import pooled_width
from rayembed.models.saving.export import new_folder
from rayembed.models.tokens import save_tokenizer


class TransformerModel(EmbeddingModel):
    """Base class: a pretrained backbone, possibly further parts, and a tokenizer, which are saved
    in one folder.
    """

    config: ModelConfig
    backbone: Any
    """A transformers model, possibly with adapters."""
    tokenizer: PromptTokenizer

    @property
    def parts(self) -> dict[str, Any]:
        """Pretrained models by setting name, the backbone first."""
        return {"backbone": self.backbone}

    @property
    def head(self) -> nn.Module:
        """Layers that are not pretrained, such as a pooling with weights; most models have none."""
        return nn.Identity()

    @property
    def part_tokenizers(self) -> dict[str, Any]:
        """Tokenizers of transformers that are saved with the parts, by part name."""
        return {"backbone": self.tokenizer.pretrained}

    @property
    def trained_parts(self) -> list[Any]:
        """Parts of the model that are trained or have trained adapters."""
        return [part for name, part in self.parts.items() if name not in self.config.frozen]

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter belongs to a pretrained part or an adapter."""
        path = name.split(".")
        return any(part in path for part in self.parts)

    def why_padded(self) -> str | None:
        """Return the reason why texts must be padded; None if all parts can read packed texts."""
        reasons = (why_part_padded(name, part) for name, part in self.parts.items())
        return next((reason for reason in reasons if reason is not None), None)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the layers of all parts in place, see `layers.compile_layers`."""
        compile_layers(self.parts.values(), backend)

    def check_passes(self, what: str) -> None:
        """Raise unless a test pass gives finite numbers; called before the model is saved.

        By its vectors of short texts; a model that gives no vectors has a method of its own.

        Args:
            what: the model, for the message.

        Raises:
            ArtifactError: they are not; see `encoding.check_vectors`.
        """
        check_vectors(self, what)

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Save the model to a folder atomically, with adapters merged into its weights.

        An older model in the folder is replaced.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.

        Raises:
            ArtifactError: the folder holds something else than a model of rayembed, or a weight is
                not finite, or what the model gives for a text; the folder stays as it is.
            ConfigError: the model is quantised.
            StorageFullError: there is no room for it; the folder stays as it is.
        """
        check_not_quantised(self.parts)
        with new_folder(folder) as written:
            written.mkdir()
            self.write_files(written, instructions=instructions)
            check_finite_files(written)
            self.check_passes(f"the model {str(folder)!r}")

    def write_files(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write the files of the model into an existing folder."""
        import safetensors.torch

        if not self.config.has_plain_format:
            (folder / "backbone").mkdir(exist_ok=True)
            write_json(folder / "config.json", {"model_type": MODEL_TYPE, "kind": self.config.kind})
        for name, part in self.parts.items():
            part.save_pretrained(str(part_folder(folder, name)), state_dict=merged_state(part))
        head = {name: value.contiguous() for name, value in self.head.state_dict().items()}
        if head:
            safetensors.torch.save_file(head, folder / POOLING_FILE)
        for name, pretrained in self.part_tokenizers.items():
            tokenizer = _padding_tokenizer(self) if name == "backbone" else pretrained
            save_tokenizer(tokenizer, part_folder(folder, name))
        architecture_of(self.config).write_more(self, folder)
        write_settings(self, folder)
        modules = architecture_of(self.config).write_sentence_files(self, folder)
        write_sentence_files(self, modules, folder, instructions or {})
        let_all_read(folder)


class PooledTransformer(TransformerModel):
    """Model whose embedding is the pooled and normalised hidden states of its backbone, in
    float32.
    """

    takes_packed = True

    def __init__(
        self,
        config: ModelConfig,
        backbone: Any,
        pooling: nn.Module,
        tokenizer: PromptTokenizer,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.pooling = pooling
        self.tokenizer = tokenizer
        self.dimensions = (pooled_width(pooling, int(backbone.config.hidden_size)),)
        self._first_position = first_position(backbone)

    @property
    def head(self) -> nn.Module:
        """The pooling layer."""
        return self.pooling

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Embed a collated micro-batch to unit vectors (B, D); `context` must be None."""
        states, layout = token_states(self.backbone, batch, self._first_position)
        pooled = self.pooling(states, layout, batch["pool_mask"])
        if pooled.shape[1] > self.dimensions[0]:
            pooled = pooled[:, : self.dimensions[0]]
        return EmbedOutput(functional.normalize(pooled, dim=-1))


def write_settings(model: TransformerModel, folder: Path, **more: Any) -> None:
    """Write `rayembed.json`, with the given further entries."""
    settings = model.config.as_saved().model_dump(mode="json")
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


def let_all_read(folder: Path) -> None:
    """Make all files of a folder readable for every user, since temporary folders are private."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.chmod(path, 0o644)  # noqa: PTH101


def _padding_tokenizer(model: TransformerModel) -> Any:
    """Return the tokenizer to save; for sentence-transformers, which needs a padding token, EOS is
    used if there is no other.

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


def write_sentence_files(
    model: TransformerModel,
    modules: Sequence[ModuleEntry],
    folder: Path,
    instructions: Mapping[str, str],
) -> None:
    """Write `modules.json` and the prompts for sentence-transformers."""
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
