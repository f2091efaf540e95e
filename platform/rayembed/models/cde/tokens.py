"""CDE's tokens: a prefix or an instruction before a text; both encoders get the same tokens."""

from collections.abc import Mapping
from pathlib import Path

from rayembed.errors import ConfigError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.tokens import PrefixTokenizer, pretrained_tokenizer


def make_tokenizer(config: CDEConfig, folders: Mapping[str, Path]) -> PrefixTokenizer:
    """Make the tokenizer of both encoders; pooling leaves out the prompt if the settings
    say so.

    Args:
        folders: of the backbone and, where it may differ, of the encoder.

    Raises:
        ArtifactError: no fast tokenizer in a folder.
        ConfigError: both stages have other vocabularies.
    """
    pretrained = pretrained_tokenizer(folders["backbone"])
    if "encoder" in folders:
        other = pretrained_tokenizer(folders["encoder"])
        if pretrained.get_vocab() != other.get_vocab():
            raise ConfigError(
                f"model.encoder.path {config.encoder.path!r} and model.backbone.path "
                f"{config.backbone.path!r} have different vocabularies; both encoders of CDE "
                "read the same tokens, so use encoders of one family"
            )
    return PrefixTokenizer(pretrained, config, pool_prompt=config.pool_instruction)
