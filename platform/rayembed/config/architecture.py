"""Base class of an architecture's settings, with defaults for a plain bi-encoder."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

from pydantic import PositiveInt

from rayembed.config.backbone import BackboneConfig, LoraConfig
from rayembed.config.instructions import literal_prompt
from rayembed.config.settings import Settings
from rayembed.config.types import Role


class Adapters(NamedTuple):
    """LoRA adapters of one pretrained part."""

    config: LoraConfig
    setting: str
    """Path of the adapters' settings, for messages: `model.lora`."""


class ArchitectureConfig(Settings):
    """Settings of a model; each architecture has a class of its own, told apart by `kind`.

    Everything that changes vectors is a setting. The properties say what others ask about a model
    without building it; they need neither torch nor files.
    """

    architecture: ClassVar[str]
    """Import string of the architecture's code, an object of `models.architecture.Architecture`."""
    prompt_table: ClassVar[str | None] = None
    """Table of published prompts that fits the architecture; None for none."""

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
        """Asset references of the pretrained parts by setting, the backbone first.

        Every setting that names one has a `path`.
        """
        return {"backbone": self.backbone.path}

    @property
    def adapters(self) -> dict[str, Adapters]:
        """LoRA adapters of the pretrained parts that have adapters; others are trained whole."""
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
        """Settings of the trained model: without adapters, and without what only training needs."""
        return self.without_adapters().model_copy(update={"keep_zeros": False})

    @property
    def template(self) -> str | None:
        """Template with `{instruction}` that is put before a text; None: the instruction follows
        the role's prefix as plain text.
        """
        template: str | None = getattr(self, "instruction_template", None)
        return template

    @property
    def prefixes(self) -> Mapping[Role, str]:
        """Text before each text of a role that has no instruction; empty: takes instructions only.

        With a `template` an instruction replaces it.
        """
        if not hasattr(self, "query_prefix"):
            return {}
        return {"query": self.query_prefix, "document": getattr(self, "document_prefix", "")}

    def prompt(self, instruction: str, role: Role = "query") -> str:
        """Literal prompt before a text of this role; an empty instruction is none."""
        return literal_prompt(instruction, self.prefixes.get(role, ""), self.template)

    @property
    def example_tokens(self) -> int:
        """Maximum tokens of in-context examples before a query; 0: it is trained without any."""
        return 0

    @property
    def context_places(self) -> int:
        """Maximum number of corpus documents that form a text's context; 0: it reads none."""
        return 0

    @property
    def added_tokens(self) -> int:
        """Number of extra positions, such as context vectors, before each text; each costs as much
        as a token.
        """
        return self.context_places

    @property
    def num_experts(self) -> int:
        """Number of experts of each mixture; 0 without mixtures."""
        return 0

    @property
    def offered_dimensions(self) -> tuple[int, ...] | None:
        """Widths besides the full one to which vectors can be cut; None: the loss's widths."""
        return None

    @property
    def head_settings(self) -> dict[str, object]:
        """Settings that determine the weights outside the pretrained parts; equal ones fit."""
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
