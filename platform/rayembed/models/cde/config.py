"""Settings of Contextual Document Embeddings (arXiv 2410.02525)."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from rayembed.config.architecture import Adapters, ArchitectureConfig
from rayembed.config.backbone import BackboneConfig, LoraConfig
from rayembed.config.settings import Settings
from rayembed.config.types import ModelReference, Template


class FirstStageConfig(Settings):
    """Settings of CDE's first encoder, which embeds context documents in the backbone's dtype."""

    path: ModelReference
    """Asset reference; its vocabulary must equal the backbone's."""


class CDEConfig(ArchitectureConfig):
    """Settings of an encoder that reads a text after vectors of its corpus's documents (arXiv
    2410.02525).

    The first stage (`encoder`, mean, MLP) makes a vector of each context document; the second
    (`backbone`) reads `[context; soft prompts; text]`. Queries and documents share both stages.

    The defaults are the paper's. Its two releases differ: jxm/cde-small-v1 has
    `num_soft_prompts=8` and `output=mlp`; v2 has ModernBERT in both stages, `num_soft_prompts=8`,
    `output=residual`, `context_positions=counted`, `pool_instruction=false` and
    `normalize_twice=true`.
    """

    architecture: ClassVar[str] = "rayembed.models.cde.architecture:CDE_ARCHITECTURE"
    prompt_table: ClassVar[str | None] = "cde"

    kind: Literal["cde"] = "cde"
    backbone: BackboneConfig
    """Backbone of the second stage."""
    encoder: FirstStageConfig
    """Encoder of the first stage, with separate weights."""
    num_context: PositiveInt = 512
    """J: context documents before every text. Unused places hold the null token; of more documents,
    J are drawn."""
    sequence_dropout: float = Field(default=0.005, ge=0.0, lt=1.0)
    """Share of context vectors that the null token replaces in training, drawn for each text."""
    num_soft_prompts: int = Field(default=0, ge=0)
    """Learnt vectors between context and text."""
    output: Literal["mean", "mlp", "residual"] = "mean"
    """Output head: the embedding is the mean over the text's states, an MLP of it, or the sum of
    both."""
    context_positions: Literal["none", "counted"] = "none"
    """Positions of context documents. `none`: their order is irrelevant (section 10.4). `counted`:
    they have positions like tokens."""
    pool_context: bool = False
    """Whether the mean includes context and soft prompts, as by default in the public code; the
    paper pools "over text tokens only, never contextual tokens"."""
    pool_instruction: bool = True
    """Whether the mean includes a text's prefix, and the CLS before it."""
    normalize_twice: bool = False
    """Whether the embedding layer's norm is applied to a text's tokens before the backbone applies
    it, as released v2 was trained (ModernBERT)."""
    lora: LoraConfig | None = None
    """LoRA adapters on both stages; None trains them whole."""
    query_prefix: str = "search_query: "
    """Text before every query without an instruction (section 10.7)."""
    document_prefix: str = "search_document: "
    """Text before every document without an instruction, context documents included."""
    instruction_template: Template = "{instruction}"
    """Template of a text's instruction, such as `classification: `, which replaces the prefix."""
    query_max_length: PositiveInt = 512
    """Maximum tokens of a query, special ones included; context and soft prompts are additional."""
    document_max_length: PositiveInt = 512
    """Maximum tokens of a document or context document; see `query_max_length`."""

    @property
    def parts(self) -> dict[str, str]:
        """Paths of the second encoder (the backbone) and of the first."""
        return {"backbone": self.backbone.path, "encoder": self.encoder.path}

    @property
    def adapters(self) -> dict[str, Adapters]:
        """Adapter settings, which are the same for both encoders."""
        found = super().adapters
        return dict.fromkeys(self.parts, found["backbone"]) if found else {}

    @property
    def context_places(self) -> int:
        """Number J of context vectors before each text."""
        return self.num_context

    @property
    def added_tokens(self) -> int:
        """Number of vectors before each text: context vectors and soft prompts."""
        return self.num_context + self.num_soft_prompts

    @property
    def head_settings(self) -> dict[str, object]:
        """Settings that decide the shape of the head: number of soft prompts and kind of output."""
        return self.model_dump(include={"kind", "num_soft_prompts", "output"})

    @property
    def description(self) -> str:
        """Description of the model for people: its architecture, and the size of its context."""
        return (
            f"An encoder that reads a text behind vectors of {self.num_context} documents of its "
            "corpus (contextual document embeddings, arXiv 2410.02525)"
        )
