"""Models from settings: pretrained parts, a head, fresh adapters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rayembed.config.model import (
    BackboneConfig,
    BiEncoderConfig,
    Causal2VecConfig,
    CDEConfig,
    ModelConfig,
    NomicMoeConfig,
    NVEmbedConfig,
)
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.backbones import (
    Mask,
    empty_backbone,
    load_backbone,
    num_positions,
    sees_later_tokens,
    settled_backbone,
    torch_dtype,
)
from rayembed.models.biencoder import BiEncoder
from rayembed.models.causal2vec import Causal2Vec
from rayembed.models.causal2vec_tokens import Causal2VecTokenizer
from rayembed.models.cde import CDE
from rayembed.models.cde_tokens import CDETokenizer
from rayembed.models.context_layers import ContextLayers
from rayembed.models.context_positions import Layout
from rayembed.models.contextual_tokens import (
    ContextualTokens,
    build_contextual_tokens,
    scale_to_words,
)
from rayembed.models.contract import PromptTokenizer
from rayembed.models.json_file import read_json
from rayembed.models.lora import add_lora
from rayembed.models.nomic_moe import NomicMoe, NomicMoeTokenizer, dimensions_of
from rayembed.models.nomic_moe_start import (
    empty_start,
    load_start,
)
from rayembed.models.nvembed import NVEmbed
from rayembed.models.pooling import build_head as build_pooling_head
from rayembed.models.tokens import (
    BiEncoderTokenizer,
    NVEmbedTokenizer,
    ReleasedNVEmbedTokenizer,
    SpecialIds,
    append_stated_eos,
)
from rayembed.models.transformer_model import TransformerModel

Folders = Path | Mapping[str, Path]
"""Folder of the backbone, or of each pretrained part by its setting (`backbone`, `encoder`)."""


def build_model(config: ModelConfig, folders: Folders, *, seed: int) -> TransformerModel:
    """Build the model to train: pretrained parts, a head, fresh adapters, in training mode.

    The head is fresh too, unless the backbone's folder has a trained one of the same kind (see
    `start`). Everything is in the config's dtype, on the CPU; the model's own settings name it. The
    same seed gives the same weights whatever the state of the random generators, and leaves that
    state as it was.

    Raises:
        ArtifactError: no usable model or tokenizer in a folder.
        ConfigError: settings that do not fit a pretrained part.
    """
    from rayembed.models.start import find_start

    config = config.model_copy(update={"backbone": settled_backbone(config.backbone)})
    start = find_start(folders, config)
    tokenizer = make_tokenizer(config, start.transformer, start.encoder)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed GPUs too, and their state is not put back.
        torch.default_generator.manual_seed(seed)
        backbone = load_main(start.transformer, config)
        check_word_width(config, backbone)
        encoder = None
        if start.encoder is not None:
            encoder = load_encoder(config, start.encoder)
        head = build_head(config, backbone.config, encoder and encoder.config)
        if start.load_head is not None:
            start.load_head(head)
        head.to(torch_dtype(config.backbone.dtype))
        if isinstance(head, ContextualTokens) and start.load_head is None:
            _start_contextual_tokens(config, backbone, encoder, head)
        if config.lora is not None:
            add_lora(backbone, config.lora, setting="model.lora")
        if encoder is not None:
            _prepare_encoder(config, encoder)
    return assemble(config, backbone, encoder, head, tokenizer).train()


def _start_contextual_tokens(
    config: ModelConfig, backbone: Any, encoder: Any, head: ContextualTokens
) -> None:
    assert isinstance(config, Causal2VecConfig)
    if config.contextual_tokens and config.contextual_start == "words":
        scale_to_words(head, encoder, backbone.get_input_embeddings())


def check_word_width(config: ModelConfig, backbone: Any) -> None:
    """Check that vectors inserted among the backbone's word embeddings have their width.

    Raises:
        ConfigError: its words are narrower than its states (OPT-350m, ALBERT, small ELECTRA).
    """
    puts_in = isinstance(config, CDEConfig) or (
        isinstance(config, Causal2VecConfig) and config.contextual_tokens
    )
    if not puts_in:
        return
    width, hidden = backbone.get_input_embeddings().embedding_dim, backbone.config.hidden_size
    if width != hidden:
        raise ConfigError(
            f"model.backbone.path {config.backbone.path!r}: its words are {width} wide and its "
            f"states {hidden}, and a {config.kind} puts vectors with the width of states among its "
            "words; take a model in which both are the same"
        )


def check_buildable(config: ModelConfig, folders: Folders) -> TransformerModel:
    """Check that `build_model` is possible without reading weights; the model on the meta device.

    Raises:
        ArtifactError: no usable model or tokenizer in a folder.
        ConfigError: settings that do not fit a pretrained part.
    """
    from rayembed.models.start import find_start

    start = find_start(folders, config)
    tokenizer = make_tokenizer(config, start.transformer, start.encoder)
    backbone = empty_main(start.transformer, config)
    check_word_width(config, backbone)
    added = 0
    if isinstance(config, CDEConfig):
        _check_not_causal("model.backbone.path", backbone, start.transformer)
        added = Layout.of(config, backbone).num_positions(0)
    for role, length in tokenizer.max_lengths.items():
        _check_positions(f"model.{role}_max_length", length, backbone, "backbone", added)
    encoder = None
    if start.encoder is not None:
        encoder = empty_backbone(start.encoder, _encoder_config(config, start.encoder), mask="own")
        _check_not_causal("model.encoder.path", encoder, start.encoder)
        if isinstance(config, Causal2VecConfig) and config.encoder is not None:
            length = config.encoder.max_length
            _check_positions("model.encoder.max_length", length, encoder, "encoder")
        else:
            length = tokenizer.max_lengths["document"]
            _check_positions("model.document_max_length", length, encoder, "encoder")
    with torch.device("meta"):
        head = build_head(config, backbone.config, encoder and encoder.config)
        if config.lora is not None:
            add_lora(backbone, config.lora, setting="model.lora")
        if encoder is not None:
            _prepare_encoder(config, encoder)
        return assemble(config, backbone, encoder, head, tokenizer)


def _check_positions(setting: str, length: int, model: Any, what: str, added: int = 0) -> None:
    """Check that the backbone has positions for a text of maximum length and `added` further
    tokens.
    """
    positions = num_positions(model)
    if positions is not None and length + added > positions:
        behind = f", of which what stands before a text takes {added}" if added else ""
        raise ConfigError(
            f"{setting} is {length}, but the {what} has learnt {positions} positions{behind}; set "
            f"it to {max(positions - added, 0)} at most"
        )


def load_main(folder: Path, config: ModelConfig) -> Any:
    """Load the backbone of a model from its folder, in its dtype.

    Raises:
        ArtifactError: no such model, damaged, or weights missing.
        ConfigError: settings that do not fit it, or CDE's does not see later tokens.
    """
    if isinstance(config, NomicMoeConfig):
        _check_backbone_settings(config)
        return load_start(folder, config, torch_dtype(config.backbone.dtype))
    backbone = load_backbone(folder, config.backbone, mask=mask_of(config))
    if isinstance(config, CDEConfig):
        _check_bidirectional("model.backbone.path", backbone, folder)
    return backbone


def empty_main(folder: Path, config: ModelConfig) -> Any:
    """Backbone on the meta device, without reading weights; see `load_main`."""
    if isinstance(config, NomicMoeConfig):
        _check_backbone_settings(config)
        return empty_start(folder, config)
    return empty_backbone(folder, config.backbone, mask=mask_of(config))


def _check_backbone_settings(config: NomicMoeConfig) -> None:
    if config.backbone.num_layers is not None:
        raise ConfigError(
            "model.backbone.num_layers: a nomic-moe keeps all layers of its start; set it to null"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(config.backbone, name) > 0:
            raise ConfigError(f"model.backbone.{name}: a nomic-moe has no dropout; set it to 0")


def mask_of(config: NVEmbedConfig | BiEncoderConfig | Causal2VecConfig | CDEConfig) -> Mask:
    """Attention mask that a config requires of its backbone."""
    return "own" if isinstance(config, BiEncoderConfig | CDEConfig) else config.mask


def load_encoder(config: ModelConfig, folder: Path) -> Any:
    """Load the pretrained encoder beside a backbone, in the backbone's dtype.

    Raises:
        ArtifactError: no such model, damaged, or weights missing.
        ConfigError: it does not see later tokens.
    """
    encoder = load_backbone(folder, _encoder_config(config, folder), mask="own")
    _check_bidirectional("model.encoder.path", encoder, folder)
    return encoder


def _check_bidirectional(setting: str, model: Any, folder: Path) -> None:
    if not sees_later_tokens(model):
        raise _is_causal(setting, model, folder)


def _check_not_causal(setting: str, model: Any, folder: Path) -> None:
    """Check by its layers that a weightless model is not causal; see `_check_bidirectional`."""
    if any(getattr(module, "is_causal", False) for module in model.modules()):
        raise _is_causal(setting, model, folder)


def _is_causal(setting: str, model: Any, folder: Path) -> ConfigError:
    return ConfigError(
        f"{setting} {str(folder)!r} is a model of the family {model.config.model_type!r}, "
        "whose tokens do not see later ones; take a bidirectional encoder"
    )


def _encoder_config(config: ModelConfig, folder: Path) -> BackboneConfig:
    return BackboneConfig(path=str(folder), dtype=config.backbone.dtype)


def _prepare_encoder(config: ModelConfig, encoder: Any) -> None:
    """Freeze an encoder or add its adapters, in place."""
    if isinstance(config, CDEConfig):
        if config.lora is not None:
            add_lora(encoder, config.lora, setting="model.lora")
        return
    assert isinstance(config, Causal2VecConfig)
    assert config.encoder is not None
    if config.encoder.frozen:
        encoder.requires_grad_(False)
    elif config.encoder.lora is not None:
        add_lora(encoder, config.encoder.lora, setting="model.encoder.lora")


def build_head(config: ModelConfig, backbone: Any, encoder: Any | None) -> torch.nn.Module:
    """Build the randomly initialised layers beside the pretrained parts of a config.

    Args:
        backbone: its transformers configuration.
        encoder: that of the encoder; None: there is none.

    Raises:
        ConfigError: heads that do not fit the hidden size.
    """
    if isinstance(config, Causal2VecConfig):
        return build_contextual_tokens(config, int(backbone.hidden_size), encoder)
    if isinstance(config, CDEConfig):
        width = int(getattr(encoder, "hidden_size", 0))
        return ContextLayers(config, width, int(backbone.hidden_size))
    if isinstance(config, NomicMoeConfig):
        dimensions_of(config, backbone)
        return torch.nn.Identity()
    return build_pooling_head(config, int(backbone.hidden_size))


def assemble(
    config: ModelConfig,
    backbone: Any,
    encoder: Any | None,
    head: torch.nn.Module,
    tokenizer: PromptTokenizer,
) -> TransformerModel:
    """Model class of the config around finished parts."""
    match config:
        case NVEmbedConfig():
            assert isinstance(tokenizer, NVEmbedTokenizer)
            return NVEmbed(config, backbone, head, tokenizer)
        case BiEncoderConfig():
            assert isinstance(tokenizer, BiEncoderTokenizer)
            return BiEncoder(config, backbone, head, tokenizer)
        case Causal2VecConfig():
            assert isinstance(tokenizer, Causal2VecTokenizer)
            assert isinstance(head, ContextualTokens)
            return Causal2Vec(config, backbone, encoder, head, tokenizer)
        case CDEConfig():
            assert isinstance(tokenizer, CDETokenizer)
            assert isinstance(head, ContextLayers)
            return CDE(config, backbone, encoder, head, tokenizer)
        case NomicMoeConfig():
            assert isinstance(tokenizer, NomicMoeTokenizer)
            return NomicMoe(config, backbone, tokenizer)


def make_tokenizer(
    config: ModelConfig, folder: Path, encoder_folder: Path | None = None
) -> PromptTokenizer:
    """Picklable tokenizer of a model whose backbone (or export) is in the folder.

    Raises:
        ArtifactError: no fast tokenizer there, or one without an end-of-text token.
        ConfigError: maximum lengths that leave no room for text.
    """
    released = isinstance(config, NVEmbedConfig) and config.token_layout == "released"
    pretrained = pretrained_tokenizer(folder, as_written=released)
    match config:
        case NVEmbedConfig():
            layout = ReleasedNVEmbedTokenizer if released else NVEmbedTokenizer
            return layout(pretrained, config, _special_ids(pretrained, folder))
        case BiEncoderConfig():
            append_stated_eos(pretrained, folder)
            return BiEncoderTokenizer(pretrained, config)
        case Causal2VecConfig():
            reading = None
            if config.encoder is not None and encoder_folder is not None:
                length = config.encoder.max_length
                plain = BiEncoderConfig(
                    backbone=BackboneConfig(path=config.encoder.path),
                    query_max_length=length,
                    document_max_length=length,
                )
                reading = BiEncoderTokenizer(pretrained_tokenizer(encoder_folder), plain)
            special = _special_ids(pretrained, folder)
            return Causal2VecTokenizer(pretrained, reading, config, special)
        case CDEConfig():
            if encoder_folder is not None:
                _check_same_tokens(pretrained, pretrained_tokenizer(encoder_folder), config)
            return CDETokenizer(pretrained, config)
        case NomicMoeConfig():
            return NomicMoeTokenizer(pretrained, config)


def _check_same_tokens(backbone: Any, encoder: Any, config: CDEConfig) -> None:
    """Check that both stages have the same vocabulary.

    Raises:
        ConfigError: they have not.
    """
    if backbone.get_vocab() != encoder.get_vocab():
        raise ConfigError(
            f"model.encoder.path {config.encoder.path!r} and model.backbone.path "
            f"{config.backbone.path!r} have other vocabularies; both stages of CDE read the same "
            "tokens, so take encoders of one family"
        )


def pretrained_tokenizer(folder: Path, *, as_written: bool = False) -> Any:
    """Fast tokenizer of transformers in the folder.

    Args:
        as_written: by its tokenizer.json alone. From version 5 on transformers makes its own rules
            for a `LlamaTokenizer` in place of those of the file, and reads texts that begin with a
            space or hold `</s>` in another way than NV-Embed was published with.

    Raises:
        ArtifactError: there is none.
    """
    import transformers

    if as_written and not (folder / "tokenizer.json").is_file():
        raise ArtifactError(f"no tokenizer in {str(folder)!r}: tokenizer.json is missing")
    kind = transformers.PreTrainedTokenizerFast if as_written else transformers.AutoTokenizer
    try:
        pretrained = kind.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"no tokenizer in {str(folder)!r}: {error}") from error
    if not pretrained.is_fast:
        raise ArtifactError(
            f"the tokenizer in {str(folder)!r} is not a fast one; convert it to a tokenizer.json"
        )
    return pretrained


def _special_ids(pretrained: Any, folder: Path) -> SpecialIds:
    settings = read_json(folder / "config.json")
    return SpecialIds(pretrained, settings.get("text_config") or settings)
