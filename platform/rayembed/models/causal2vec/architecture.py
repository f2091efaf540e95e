"""Causal2Vec architecture: builds the model from its settings and writes its files."""

from torch import nn

from rayembed.models.architecture import (
    Architecture,
    Folders,
    Parts,
    Shapes,
    check_positions,
    check_word_width,
)
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.causal2vec.contextual_tokens import (
    ContextualTokens,
    build_contextual_tokens,
    scale_to_words,
)
from rayembed.models.causal2vec.model import Causal2Vec
from rayembed.models.causal2vec.tokens import Causal2VecTokenizer
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.backbones import Mask, check_bidirectional
from rayembed.models.tokens import plain_tokenizer, pretrained_tokenizer, special_ids


class Causal2VecArchitecture(Architecture):
    """Architecture of an LLM with an optional bidirectional encoder."""

    def mask(self, config: Causal2VecConfig) -> Mask:
        """Return the LLM's attention mask from the settings."""
        return config.mask

    def build_head(self, config: Causal2VecConfig, shapes: Shapes) -> ContextualTokens:
        """Build the layers between encoder and LLM."""
        width = int(shapes["backbone"].hidden_size)
        return build_contextual_tokens(config, width, shapes.get("encoder"))

    def start_head(self, config: Causal2VecConfig, head: nn.Module, parts: Parts) -> None:
        """Scale the Contextual tokens to the norm of the LLM's word vectors."""
        if config.contextual_tokens and config.contextual_start == "words":
            assert isinstance(head, ContextualTokens)
            scale_to_words(head, parts["encoder"], parts["backbone"].get_input_embeddings())

    def tokenizer(self, config: Causal2VecConfig, folders: Folders) -> Causal2VecTokenizer:
        """Make the tokenizer of the LLM's sequence, combined with the encoder's tokenizer."""
        folder = folders["backbone"]
        pretrained = pretrained_tokenizer(folder)
        reading = None
        if config.encoder is not None and "encoder" in folders:
            read = pretrained_tokenizer(folders["encoder"])
            reading = plain_tokenizer(read, config.encoder.max_length)
        return Causal2VecTokenizer(pretrained, reading, config, special_ids(pretrained, folder))

    def assemble(
        self, config: Causal2VecConfig, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> Causal2Vec:
        """Build the model around LLM and encoder."""
        assert isinstance(head, ContextualTokens)
        assert isinstance(tokenizer, Causal2VecTokenizer)
        return Causal2Vec(config, parts["backbone"], parts.get("encoder"), head, tokenizer)

    def check_parts(self, config: Causal2VecConfig, parts: Parts, folders: Folders) -> None:
        """Check that Contextual tokens are as wide as the LLM's word vectors, and that the encoder
        is bidirectional.
        """
        if config.contextual_tokens:
            check_word_width(parts["backbone"], config.kind, config.backbone.path)
        if "encoder" in parts:
            check_bidirectional("model.encoder.path", parts["encoder"], folders["encoder"])

    def check_lengths(self, config: Causal2VecConfig, parts: Parts) -> None:
        """Check that LLM and encoder have positions for texts of their maximum length; the encoder
        has a length setting of its own.
        """
        super().check_lengths(config, parts)
        if config.encoder is not None:
            length = config.encoder.max_length
            check_positions("model.encoder.max_length", length, parts["encoder"], "encoder")


CAUSAL2VEC = Causal2VecArchitecture()
