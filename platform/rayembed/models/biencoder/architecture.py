"""Bi-encoder architecture: builds the model from its settings and writes its files."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rayembed.assets.sentence_modules import is_own_format
from rayembed.config.backbone import ProjectionConfig
from rayembed.errors import ArtifactError
from rayembed.models.architecture import (
    Architecture,
    Folders,
    ModuleEntry,
    Parts,
    Published,
    Shapes,
)
from rayembed.models.biencoder.checkpoint import (
    EncoderFolder,
    published_width,
    read_encoder_folder,
    saved_in_float16,
    write_plain_format,
)
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.backbones import (
    empty_backbone,
    first_position,
    load_backbone,
    row_positions,
    torch_dtype,
)
from rayembed.models.loading.saved_folder import SETTINGS_FILE
from rayembed.models.loading.sentence_folder import load_projections, read_modules, read_stated
from rayembed.models.pooling import ProjectedPooling, build_pooling
from rayembed.models.tokens import (
    PrefixTokenizer,
    append_stated_eos,
    check_tokenizer,
    pretrained_tokenizer,
)
from rayembed.models.transformer_model import PooledTransformer


class BiEncoder(PooledTransformer):
    """Embedding model that embeds queries and documents with the same weights; they may differ in
    prefix and length.
    """

    config: BiEncoderConfig
    tokenizer: PrefixTokenizer

    def __init__(
        self, config: BiEncoderConfig, backbone: Any, pooling: nn.Module, tokenizer: PromptTokenizer
    ) -> None:
        super().__init__(config, backbone, pooling, tokenizer)
        whole = self.dimensions[0]
        self.dimensions = (min(whole, config.width or whole),)


class BiEncoderArchitecture(Architecture):
    """Architecture of any transformer with its family's attention mask, a pooling and optional
    linear layers.
    """

    takes_any_encoder = True

    def build_head(self, config: BiEncoderConfig, shapes: Shapes) -> nn.Module:
        """Build the pooling with its projections."""
        pooling = build_pooling(config.pooling)
        if not config.projections:
            return pooling
        width = int(shapes["backbone"].hidden_size)
        return ProjectedPooling(pooling, width, config.projections)

    def tokenizer(self, config: BiEncoderConfig, folders: Folders) -> PrefixTokenizer:
        """Make the tokenizer, which puts prefix or instruction before each text; all tokens are
        pooled.
        """
        pretrained = pretrained_tokenizer(folders["backbone"])
        append_stated_eos(pretrained, folders["backbone"])
        return PrefixTokenizer(pretrained, config)

    def assemble(
        self, config: BiEncoderConfig, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> BiEncoder:
        """Build the model around its backbone."""
        return BiEncoder(config, parts["backbone"], head, tokenizer)

    def projections(self, config: BiEncoderConfig) -> tuple[ProjectionConfig, ...]:
        """Return the projections that the settings name."""
        return config.projections

    def remark_on_start(
        self, config: BiEncoderConfig, folder: Path, transformer: Path
    ) -> str | None:
        """Return a remark if a sentence-transformers folder pools or cuts vectors differently from
        the run.
        """
        if (folder / SETTINGS_FILE).is_file() or not (folder / "modules.json").is_file():
            return None
        pooling, width = read_modules(folder).pooling, read_stated(folder).width
        if config.pooling != pooling:
            return (
                f"the start model pools by {pooling.kind}, this run by {config.pooling.kind} "
                "(model.pooling.kind)"
            )
        if config.width == width:
            return None
        return f"the start model cuts vectors at {width}, this run at {config.width} (model.width)"

    def published(self, folder: Path) -> Published | None:
        """Read an encoder in the format of sentence-transformers or of transformers."""
        found = read_encoder_folder(folder)
        return Published(
            found.config,
            found.transformer,
            width=partial(published_width, found),
            load=lambda dtype: self._load(read_encoder_folder(folder, dtype=dtype)),
            check=partial(self._check, found),
            in_float16=partial(self._load_float16, found),
        )

    def _check(self, found: EncoderFolder) -> None:
        _check_tokens(
            found.transformer,
            empty_backbone(found.transformer, found.config.backbone, mask="own"),
        )

    def check_sentence_files(self, config: BiEncoderConfig, folder: Path) -> None:
        """Check that the files of sentence-transformers state the same pooling, projections, length
        and width as the settings.
        """
        if is_own_format(folder):  # a graph, of which sentence-transformers reads no modules
            return
        modules = read_modules(folder)
        pairs = {
            "pooling": (modules.pooling, config.pooling),
            "projections": (modules.projections, config.projections),
            "max_seq_length": (modules.max_length, max(config.max_lengths.values())),
            "truncate_dim": (read_stated(folder).width, config.width),
        }
        for name, (stated, own) in pairs.items():
            if stated != own:
                raise ArtifactError(
                    f"the files for sentence-transformers in {str(folder)!r} have "
                    f"{name}={stated}, but {SETTINGS_FILE} has {own}; one of them was changed: "
                    "export the model again, or make both the same"
                )

    def _load_float16(self, found: EncoderFolder) -> BiEncoder | None:
        if not saved_in_float16(found):
            return None
        # Not validated: a run has no such number type.
        backbone = found.config.backbone.model_copy(update={"dtype": "float16"})
        config = found.config.model_copy(update={"backbone": backbone})
        return self._load(found._replace(config=config))

    def _load(self, found: EncoderFolder) -> BiEncoder:
        config, transformer, dense = found
        parts = {"backbone": load_backbone(transformer, config.backbone, mask="own")}
        _check_tokens(transformer, parts["backbone"])
        head = self.build_head(config, {"backbone": parts["backbone"].config})
        load_projections(head, dense)
        head.to(torch_dtype(config.backbone.dtype))
        tokenizer = self.tokenizer(config, {"backbone": transformer})
        return self.assemble(config, parts, head, tokenizer).eval()

    def write_sentence_files(self, model: BiEncoder, folder: Path) -> list[ModuleEntry]:
        """Write the model in the standard format of sentence-transformers."""
        return write_plain_format(model, folder)


def _check_tokens(folder: Path, backbone: Any) -> None:
    """Raise if sentence-transformers would tokenise texts differently from rayembed with this
    folder's tokenizer.
    """
    check_tokenizer(
        pretrained_tokenizer(folder),
        folder,
        row_positions=row_positions(backbone),
        padding=first_position(backbone) - 1 if first_position(backbone) else None,
    )


BI_ENCODER = BiEncoderArchitecture()
