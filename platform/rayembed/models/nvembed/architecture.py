"""NV-Embed architecture: builds the model from its settings and writes its files."""

from functools import partial
from pathlib import Path

from torch import nn

from rayembed.models.architecture import Architecture, Folders, Parts, Published, Shapes
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.backbones import Mask
from rayembed.models.loading.saved_folder import SETTINGS_FILE, read_settings
from rayembed.models.nvembed import checkpoint
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.nvembed.model import NVEmbed
from rayembed.models.nvembed.pooling import build_pooling
from rayembed.models.nvembed.tokens import NVEmbedTokenizer, make_tokenizer


class NVEmbedArchitecture(Architecture):
    """Architecture of a decoder with a configurable attention mask and a pooling layer."""

    def mask(self, config: NVEmbedConfig) -> Mask:
        """Return the attention mask from the settings."""
        return config.mask

    def build_head(self, config: NVEmbedConfig, shapes: Shapes) -> nn.Module:
        """Build the pooling layer."""
        return build_pooling(config.pooling, int(shapes["backbone"].hidden_size))

    def tokenizer(self, config: NVEmbedConfig, folders: Folders) -> NVEmbedTokenizer:
        """Make the tokenizer in the token layout of the settings."""
        return make_tokenizer(config, folders["backbone"])

    def assemble(
        self, config: NVEmbedConfig, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> NVEmbed:
        """Build the model around its backbone."""
        return NVEmbed(config, parts["backbone"], head, tokenizer)

    def remark_on_start(self, config: NVEmbedConfig, folder: Path, transformer: Path) -> str | None:
        """Return a remark if the model that training starts from uses another token layout."""
        saved = read_settings(folder) if (folder / SETTINGS_FILE).is_file() else None
        if not isinstance(saved, NVEmbedConfig) or saved.token_layout == config.token_layout:
            return None
        return (
            f"the start model {folder} lays its tokens out as model.token_layout="
            f"{saved.token_layout}, this run as {config.token_layout}"
        )

    def published(self, folder: Path) -> Published | None:
        """Read nvidia/NV-Embed-v1 or v2."""
        if not checkpoint.is_published(folder):
            return None
        return Published(
            checkpoint.published_config(folder),
            folder,
            width=partial(checkpoint.published_width, folder),
            load=lambda dtype: checkpoint.load_nvidia_checkpoint(folder, dtype=dtype),
            check=lambda: None,
        )


NVEMBED = NVEmbedArchitecture()
