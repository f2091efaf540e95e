"""Causal2Vec (arXiv 2507.23386)."""

from typing import Literal

from pydantic import PositiveInt, field_validator, model_validator

from rayembed.config.backbone import BackboneConfig
from rayembed.config.credentials import refuse_credentials
from rayembed.config.instructions import check_template
from rayembed.config.lora import LoraConfig
from rayembed.config.settings import Settings


class EncoderConfig(Settings):
    """The bidirectional encoder that reads a text for Causal2Vec, in the backbone's dtype.

    It has no dropout but that of its adapters.
    """

    path: str
    """An asset reference, as that of the backbone."""
    frozen: bool = True
    """Table 10: frozen is better beside an LLM of 7B, adapters are beside smaller ones."""
    lora: LoraConfig | None = None
    """Where it is not frozen; None trains it whole."""
    max_length: PositiveInt = 512
    """Tokens of a text that it reads, special ones included; longer texts lose their end."""

    _no_credentials = field_validator("path")(refuse_credentials)

    @model_validator(mode="after")
    def _frozen_has_no_adapters(self) -> "EncoderConfig":
        if self.frozen and self.lora is not None:
            raise ValueError(
                "encoder.lora puts adapters on an encoder that encoder.frozen=true keeps as it is; "
                "set encoder.frozen=false, or encoder.lora=null"
            )
        return self


class ExamplesConfig(Settings):
    """In-context examples before queries in training, drawn anew for each (arXiv 2409.15700).

    They are pairs of the same data set from the same global batch. Where a model is used, what
    stands before a query is the caller's: `instruction_with_examples` gives it.
    """

    max_examples: PositiveInt = 5
    """Of one query; each number from zero on is as likely."""
    query_tokens: PositiveInt = 256
    """Of an example's query; what is longer loses its end."""
    response_tokens: PositiveInt = 256
    """Of an example's positive."""
    max_tokens: PositiveInt = 1536
    """Of all that stands before the text. An example that would exceed it is left out, and so are
    those behind it."""


Representation = Literal["concat", "average", "eos", "concat_encoder", "separate"]


class Causal2VecConfig(Settings):
    """A causal LLM that reads a text behind a Contextual token of it (arXiv 2507.23386).

    The sequence is BOS, `prompt_start`, instruction, Contextual token, text, `prompt_end`, EOS.
    """

    kind: Literal["causal2vec"] = "causal2vec"
    backbone: BackboneConfig
    encoder: EncoderConfig | None
    """Makes the Contextual token. None: plain last-token pooling, with `representation` `eos`
    (Table 6, without Bi-Encoder)."""
    num_contextual_tokens: PositiveInt = 1
    """One is the mean of the encoder's last states through an MLP. More are drawn from these states
    by cross-attention of as many learnt queries (Table 5)."""
    position: Literal["after_instruction", "before_instruction"] = "after_instruction"
    """Where the Contextual token stands (Table 14)."""
    representation: Representation = "concat"
    """Which vectors are the embedding (Tables 2, 4 and 12). `concat`: the LLM's last states of the
    Contextual token (the mean of several) and of EOS, one behind the other. `average`: their mean.
    `eos`: that of EOS. `concat_encoder`: the Contextual token as it goes into the LLM, and EOS.
    `separate`: the encoder's mean and EOS, each of unit length, with no Contextual token in the
    LLM's input."""
    contextual_start: Literal["words", "torch"] = "words"
    """How large Contextual tokens are before any training. `words`: as the LLM's word embeddings,
    by a factor on the MLP's last layer. `torch`: as torch's start of linear layers makes them,
    which the paper leaves open: a quarter of that beside SmolLM2 and all-MiniLM, and seen less.
    Training that goes on from a saved model begins with its MLP."""
    mask: Literal["causal", "bidirectional"] = "causal"
    """Attention mask of the LLM (Table 15)."""
    lora: LoraConfig | None = LoraConfig(rank=64, alpha=32, dropout=0.05)
    """Rank and alpha as for 7B in Table 7; None trains the whole LLM."""
    instruction_template: str = "Instruct: {instruction}\nQuery:"
    """Made of a text's instruction and put before it. Each piece of the sequence is tokenised by
    itself, so no space has to end it."""
    prompt_start: str = ""
    """How a turn of the user begins in the LLM's chat template (Appendix A.1)."""
    prompt_end: str = ""
    """How that turn ends, without EOS, which follows always."""
    examples: ExamplesConfig | None = None
    """In-context examples in training (Causal2Vec w/ ICL in Table 1); None: none."""
    query_max_length: PositiveInt = 512
    """Tokens of the LLM's sequence, all of it; longer texts lose their end, not what follows."""
    document_max_length: PositiveInt = 512
    """As `query_max_length`, for documents."""

    @property
    def contextual_tokens(self) -> int:
        """How many Contextual tokens stand in the LLM's input."""
        without = self.encoder is None or self.representation == "separate"
        return 0 if without else self.num_contextual_tokens

    @model_validator(mode="after")
    def _template_has_instruction(self) -> "Causal2VecConfig":
        check_template(self.instruction_template)
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "Causal2VecConfig":
        if self.encoder is None and self.representation != "eos":
            raise ValueError(
                f"representation {self.representation!r} needs an encoder; set representation=eos "
                "for plain last-token pooling, or encoder.path"
            )
        if self.contextual_tokens == 0 and (
            self.num_contextual_tokens != 1
            or self.position != "after_instruction"
            or self.contextual_start != "words"
        ):
            raise ValueError(
                "num_contextual_tokens, position and contextual_start say what no Contextual token "
                "is there for: leave them at 1, after_instruction and words, or take an encoder "
                "and another representation than 'separate'"
            )
        return self
