"""Base class of an architecture's settings, with defaults for a plain bi-encoder."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

from pydantic import PositiveInt

from rayembed.config.backbone import BackboneConfig, LoraConfig
from rayembed.config.instructions import literal_prompt
from rayembed.config.settings import Settings
from rayembed.config.types import Role


class Adapters(NamedTuple):
    """LoRA settings of one pretrained part of a model, and the path of these settings for error
    messages.
    """

    config: LoraConfig
    setting: str
    """Path of the adapters' settings, for messages: `model.lora`."""


class ArchitectureConfig(Settings):
    """Base class of model settings; each architecture has its own class, selected by
    `kind`.

    Everything that changes vectors is a setting. The properties say what others ask about a model
    without building it; they need neither torch nor files.
    """

    architecture: ClassVar[str]
    """Import string of the architecture's code, an object of `models.architecture.Architecture`."""
    prompt_table: ClassVar[str | None] = None
    """Table of published prompts that fits the architecture; None for none."""
    embeds: ClassVar[bool] = True
    """Whether the model gives vectors of texts. A model that gives scores of pairs is trained and
    saved as others are, but not scored, proved or registered as an embedding model."""

    kind: str
    """Name of the architecture."""
    backbone: BackboneConfig
    """The pretrained transformer."""
    query_max_length: PositiveInt = 512
    """Maximum tokens of a query, special ones included."""
    document_max_length: PositiveInt = 512
    """Maximum tokens of a document, special ones included."""
    keep_zeros: bool = False
    """Whether weights that were pruned to zero stay zero in all stages and in the export: those of
    the matrices that its `compression.json` names. Adapters are masked likewise."""

    @property
    def max_lengths(self) -> dict[Role, int]:
        """Maximum tokens of a text by role."""
        return {"query": self.query_max_length, "document": self.document_max_length}

    @property
    def parts(self) -> dict[str, str]:
        """Map settings to the asset references of the pretrained parts, the backbone first.

        Every setting that names one has a `path`.
        """
        return {"backbone": self.backbone.path}

    @property
    def adapters(self) -> dict[str, Adapters]:
        """LoRA settings by pretrained part; parts that are missing here are trained in full."""
        lora: LoraConfig | None = getattr(self, "lora", None)
        return {} if lora is None else {"backbone": Adapters(lora, "model.lora")}

    @property
    def frozen(self) -> frozenset[str]:
        """Pretrained parts that are not trained."""
        return frozenset()

    def without_adapters(self) -> Self:
        """Copy the settings for a model whose adapters are merged into its weights."""
        return self.model_copy(update={"lora": None}) if self.adapters else self

    def as_saved(self) -> Self:
        """Copy the settings for the saved model: adapters merged, options that only training uses
        removed.
        """
        return self.without_adapters().model_copy(update={"keep_zeros": False})

    @property
    def template(self) -> str | None:
        """Template with `{instruction}` for the prompt before an input; None if the instruction
        follows the role's prefix as plain text.
        """
        template: str | None = getattr(self, "instruction_template", None)
        return template

    @property
    def prefixes(self) -> Mapping[Role, str]:
        """Map each role to the prefix of texts without an instruction; empty for models that only
        take instructions.

        With a `template` an instruction replaces it.
        """
        if not hasattr(self, "query_prefix"):
            return {}
        return {"query": self.query_prefix, "document": getattr(self, "document_prefix", "")}

    def prompt(self, instruction: str, role: Role = "query") -> str:
        """Literal prompt before a text of this role; an empty instruction is treated as no
        instruction.
        """
        return literal_prompt(instruction, self.prefixes.get(role, ""), self.template)

    @property
    def example_tokens(self) -> int:
        """Maximum tokens of in-context examples before a query; 0 for models trained without
        examples.
        """
        return 0

    @property
    def context_places(self) -> int:
        """Maximum number of corpus documents that form the context of a text; 0 for models without
        context.
        """
        return 0

    @property
    def added_tokens(self) -> int:
        """Number of extra positions, such as context vectors, before each text; each costs as much
        as a token.
        """
        return self.context_places

    @property
    def num_experts(self) -> int:
        """Number of experts in each mixture-of-experts layer; 0 for models without experts."""
        return 0

    @property
    def offered_dimensions(self) -> tuple[int, ...] | None:
        """Widths below the full one to which vectors can be cut; None if these are the widths that
        the loss learns.
        """
        return None

    @property
    def head_settings(self) -> dict[str, object]:
        """Settings that determine the shapes of weights outside the pretrained parts; models with
        equal values can load each other's weights.
        """
        return {"kind": self.kind}

    @property
    def has_head(self) -> bool:
        """Whether the model has weights outside the pretrained parts."""
        return True

    @property
    def has_plain_format(self) -> bool:
        """Whether sentence-transformers loads the saved model without rayembed."""
        return False

    @property
    def description(self) -> str:
        """One-line description of the architecture for the model card."""
        return f"An embedding model of the kind `{self.kind}`"
