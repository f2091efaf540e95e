"""Nomic Embed v2 architecture: builds the model from its settings and writes its files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rayembed.config.backbone import Dtype
from rayembed.errors import ConfigError
from rayembed.models.architecture import Architecture, Folders, Parts, Published, Shapes
from rayembed.models.contract import PromptTokenizer
from rayembed.models.layers import keep_rows, replace_layers
from rayembed.models.loading.backbones import torch_dtype
from rayembed.models.loading.files import write_json
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.nomic_moe.encoder import NomicEncoder
from rayembed.models.nomic_moe.model import NomicMoe, dimensions_of
from rayembed.models.nomic_moe.shape import check_not_nomic_layout, published_settings, read_shape
from rayembed.models.nomic_moe.start import (
    empty_encoder,
    empty_start,
    is_published_nomic,
    load_start,
    loses_its_positions,
    published_nomic_config,
)
from rayembed.models.nomic_moe.tokens import NomicMoeTokenizer
from rayembed.models.tokens import pretrained_tokenizer


class NomicMoeArchitecture(Architecture):
    """Architecture of a mean-pooled encoder implemented in rayembed; BERT-like models are converted
    to it.
    """

    def load_part(self, config: NomicMoeConfig, name: str, folder: Path) -> NomicEncoder:
        """Load the encoder; convert a BERT-like model and turn MLPs into experts if the settings
        require it.
        """
        _check_backbone_settings(config)
        return load_start(folder, config, torch_dtype(config.backbone.dtype))

    def empty_part(self, config: NomicMoeConfig, name: str, folder: Path) -> NomicEncoder:
        """Build the encoder on the meta device."""
        _check_backbone_settings(config)
        return empty_start(folder, config)

    def check_part(self, config: NomicMoeConfig, name: str, folder: Path) -> None:
        """Check that a saved part can be loaded, including names and shapes of its weights."""
        self.empty_part(config, name, folder)

    def empty_of_settings(
        self, config: NomicMoeConfig, name: str, settings: Mapping[str, Any], where: str
    ) -> NomicEncoder:
        """Build the encoder on the meta device from the content of a config.json."""
        return empty_encoder(dict(settings), config, where)

    def build_head(self, config: NomicMoeConfig, shapes: Shapes) -> nn.Module:
        """Check the truncated vector widths, and return an empty head, as mean pooling has no
        weights.
        """
        dimensions_of(config, shapes["backbone"])
        return nn.Identity()

    def tokenizer(self, config: NomicMoeConfig, folders: Folders) -> NomicMoeTokenizer:
        """Make the tokenizer, which puts a prefix before each text."""
        return NomicMoeTokenizer(pretrained_tokenizer(folders["backbone"]), config)

    def assemble(
        self, config: NomicMoeConfig, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> NomicMoe:
        """Build the model around its encoder."""
        assert isinstance(tokenizer, NomicMoeTokenizer)
        return NomicMoe(config, parts["backbone"], tokenizer)

    def layer_fits(self, part: NomicEncoder, layer: int, place: int) -> bool:
        """Whether a layer may move to another position: both must have experts, or neither."""
        return part.config.is_moe(layer) == part.config.is_moe(place)

    def cut_layers(self, part: NomicEncoder, kept: Sequence[int]) -> bool:
        """Keep only the given layers of the encoder."""
        replace_layers(part, kept)
        part.config = replace(part.config, num_layers=len(kept))
        return True

    def cut_vocabulary(self, part: NomicEncoder, kept: Sequence[int]) -> bool:
        """Keep only the word vectors of the given token ids."""
        new = {old: number for number, old in enumerate(kept)}
        keep_rows(part.embeddings.word_embeddings, new)
        pad = None if part.config.pad_token_id is None else new[part.config.pad_token_id]
        part.config = replace(part.config, vocab_size=len(kept), pad_token_id=pad)
        return True

    def write_part_settings(self, part: NomicEncoder, folder: Path) -> None:
        """Write the encoder's config.json in the published layout."""
        write_json(folder / "config.json", published_settings(part.config))

    def check_lengths(self, config: NomicMoeConfig, parts: Parts) -> None:
        """Do nothing, because rotary positions have no maximum."""
        return None

    def remark_on_start(
        self, config: NomicMoeConfig, folder: Path, transformer: Path
    ) -> str | None:
        """Return a warning if rotary positions will replace the start model's learnt positions."""
        if not loses_its_positions(transformer):
            return None
        return (
            f"model.backbone.path {config.backbone.path!r} has absolute positions; rotary ones, "
            "which it has not learnt, stand in their place. rayembed pretrain adapts an "
            "encoder to them"
        )

    def check_for_transformers(self, folder: Path) -> None:
        """Raise for a folder that transformers' own NomicBert would load as a different model."""
        check_not_nomic_layout(folder)

    def published(self, folder: Path) -> Published | None:
        """Read nomic-ai/nomic-embed-text-v2-moe or another published model of this family."""
        if not is_published_nomic(folder):
            return None
        config = published_nomic_config(folder, None)
        return Published(
            config,
            folder,
            width=lambda: read_shape(folder).hidden_size,
            load=lambda dtype: self._load(folder, dtype),
            check=partial(self.empty_part, config, "backbone", folder),
        )

    def _load(self, folder: Path, dtype: Dtype) -> NomicMoe:
        config = published_nomic_config(folder, dtype)
        parts = {"backbone": self.load_part(config, "backbone", folder)}
        tokenizer = self.tokenizer(config, {"backbone": folder})
        return self.assemble(config, parts, nn.Identity(), tokenizer).eval()


def _check_backbone_settings(config: NomicMoeConfig) -> None:
    if config.backbone.num_layers is not None:
        raise ConfigError(
            "model.backbone.num_layers: a nomic-moe model always keeps all layers of its "
            "backbone; set num_layers to null"
        )
    if config.backbone.rope is not None:
        raise ConfigError(
            "model.backbone.rope: a nomic-moe model keeps the rotary position embeddings of its "
            "backbone; set rope to null"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(config.backbone, name) > 0:
            raise ConfigError(
                f"model.backbone.{name}: a nomic-moe model has no dropout; set it to 0"
            )


NOMIC_MOE = NomicMoeArchitecture()
