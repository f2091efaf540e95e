"""Settings of Causal2Vec (arXiv 2507.23386)."""

from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from rayembed.config.architecture import Adapters, ArchitectureConfig
from rayembed.config.backbone import LoraConfig
from rayembed.config.settings import Settings
from rayembed.config.types import ModelReference, Template


class EncoderConfig(Settings):
    """Settings of the bidirectional encoder that reads each text for Causal2Vec, in the backbone's
    dtype.

    It has no dropout but that of its adapters.
    """

    path: ModelReference
    """An asset reference, as that of the backbone."""
    frozen: bool = True
    """Whether the encoder is frozen. Table 10: better for an LLM of 7B; adapters are better for
    smaller ones."""
    lora: LoraConfig | None = None
    """Adapters of an encoder that is not frozen; None trains it whole."""
    max_length: PositiveInt = 512
    """Maximum tokens of a text in the encoder, special ones included; longer texts are truncated.
    """

    @model_validator(mode="after")
    def _frozen_has_no_adapters(self) -> "EncoderConfig":
        if self.frozen and self.lora is not None:
            raise ValueError(
                "encoder.lora trains adapters of the encoder, but encoder.frozen=true forbids "
                "that; set encoder.frozen=false, or encoder.lora=null"
            )
        return self


class ExamplesConfig(Settings):
    """Settings of in-context examples, which are sampled for each query in training (arXiv
    2409.15700).

    They are pairs of the same data set from the same global batch. Where a model is used, what
    stands before a query is the caller's: `instruction_with_examples` gives it.
    """

    max_examples: PositiveInt = 5
    """Maximum examples of one query; each number from zero on is equally likely."""
    query_tokens: PositiveInt = 256
    """Maximum tokens of an example's query; longer ones are truncated."""
    response_tokens: PositiveInt = 256
    """Maximum tokens of an example's positive; longer ones are truncated."""
    max_tokens: PositiveInt = 1536
    """Token budget of everything before the text. An example that exceeds it is dropped, with all
    after it."""


Representation = Literal["concat", "average", "eos", "concat_encoder", "separate"]

_REPRESENTATIONS: dict[Representation, str] = {
    "concat": "the last states of Contextual token and EOS",
    "average": "the mean of the last states of Contextual token and EOS",
    "eos": "the last state of EOS",
    "concat_encoder": "the Contextual token and the last state of EOS",
    "separate": "the encoder's mean and the last state of EOS",
}


class Causal2VecConfig(ArchitectureConfig):
    """Settings of a causal LLM that reads a text after its Contextual tokens (arXiv
    2507.23386).

    The sequence is BOS, `prompt_start`, instruction, Contextual token, text, `prompt_end`, EOS.
    """

    architecture: ClassVar[str] = "rayembed.models.causal2vec.architecture:CAUSAL2VEC"
    prompt_table: ClassVar[str | None] = "causal2vec"

    kind: Literal["causal2vec"] = "causal2vec"
    encoder: EncoderConfig | None
    """Encoder that makes the Contextual token. None: plain last-token pooling, with
    `representation` `eos` (Table 6, without Bi-Encoder)."""
    num_contextual_tokens: PositiveInt = 1
    """Number of Contextual tokens. One is the mean of the encoder's last states through an MLP;
    more come from cross-attention of as many learnt queries (Table 5)."""
    position: Literal["after_instruction", "before_instruction"] = "after_instruction"
    """Position of the Contextual token (Table 14)."""
    representation: Representation = "concat"
    """Composition of the embedding (Tables 2, 4 and 12). `concat`: the LLM's last states of the
    Contextual token (the mean of several) and of EOS, concatenated. `average`: their mean. `eos`:
    that of EOS. `concat_encoder`: the Contextual token at the LLM's input, and EOS. `separate`: the
    encoder's mean and EOS, each normalised, without a Contextual token in the LLM's input."""
    contextual_start: Literal["words", "torch"] = "words"
    """Initial norm of Contextual tokens. `words`: that of the LLM's word embeddings, by a factor on
    the MLP's last layer. `torch`: torch's default initialisation of linear layers, which the paper
    leaves open: a quarter of that with SmolLM2 and all-MiniLM, and attended to less. Training from
    a saved model starts with its MLP."""
    mask: Literal["causal", "bidirectional"] = "causal"
    """Attention mask of the LLM (Table 15)."""
    lora: LoraConfig | None = LoraConfig(rank=64, alpha=32, dropout=0.05)
    """LoRA adapters with rank and alpha as for 7B in Table 7; None trains the whole LLM."""
    instruction_template: Template = "Instruct: {instruction}\nQuery:"
    """Template that wraps an instruction before a text. Each part of the sequence is tokenised
    separately, so no space has to end it."""
    prompt_start: str = ""
    """Begin of a user turn in the LLM's chat template (Appendix A.1)."""
    prompt_end: str = ""
    """End of a user turn, without the EOS that always follows."""
    examples: ExamplesConfig | None = None
    """In-context examples in training (Causal2Vec w/ ICL in Table 1); None for none."""
    query_max_length: PositiveInt = 512
    """Maximum tokens of a query's whole LLM sequence; longer texts are truncated, not what follows
    them."""
    document_max_length: PositiveInt = 512
    """Maximum tokens of a document's whole LLM sequence; see `query_max_length`."""

    @property
    def contextual_tokens(self) -> int:
        """Number of Contextual tokens in the LLM's input."""
        without = self.encoder is None or self.representation == "separate"
        return 0 if without else self.num_contextual_tokens

    @property
    def parts(self) -> dict[str, str]:
        """Paths of the LLM and, if the model has one, of the encoder."""
        encoder = {} if self.encoder is None else {"encoder": self.encoder.path}
        return {"backbone": self.backbone.path} | encoder

    @property
    def adapters(self) -> dict[str, Adapters]:
        """Adapter settings of the LLM and, from its own setting, of the encoder."""
        found = super().adapters
        if self.encoder is not None and self.encoder.lora is not None:
            found["encoder"] = Adapters(self.encoder.lora, "model.encoder.lora")
        return found

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parts that are not trained: the encoder, if it is frozen."""
        return frozenset({"encoder"} if self.encoder is not None and self.encoder.frozen else ())

    def without_adapters(self) -> Self:
        """Copy of the settings with the adapters of both parts removed."""
        encoder = self.encoder and self.encoder.model_copy(update={"lora": None})
        return self.model_copy(update={"lora": None, "encoder": encoder})

    @property
    def example_tokens(self) -> int:
        """Token budget of in-context examples; 0 if examples are not configured."""
        return 0 if self.examples is None else self.examples.max_tokens

    @property
    def head_settings(self) -> dict[str, object]:
        """Settings that decide the shape of the head: whether Contextual tokens are in the LLM's
        input.
        """
        return {"kind": self.kind, "contextual_tokens": self.contextual_tokens}

    @property
    def has_head(self) -> bool:
        """Whether there are trained layers between encoder and LLM."""
        return self.contextual_tokens > 0

    @property
    def description(self) -> str:
        """Description of the model for people: its architecture, and which states make the
        embedding.
        """
        if self.encoder is None:
            return f"A {self.mask} LLM whose last token is the embedding"
        return (
            f"A {self.mask} LLM beside a bidirectional encoder (Causal2Vec, arXiv 2507.23386; the "
            f"embedding is {_REPRESENTATIONS[self.representation]})"
        )

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
                "num_contextual_tokens, position and contextual_start have no effect without "
                "Contextual tokens: leave them at 1, after_instruction and words, or set an "
                "encoder and another representation than 'separate'"
            )
        return self
