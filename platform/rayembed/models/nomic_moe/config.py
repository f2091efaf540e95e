"""Settings of Nomic Embed v2: an encoder with rotary positions and experts (arXiv 2502.07972)."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.backbone import BackboneConfig
from rayembed.config.settings import Settings

SEARCH_PREFIXES = ("search_query: ", "search_document: ")
"""Prefixes of queries and of documents (section 5.3)."""


class BalanceConfig(Settings):
    """Settings of the experts' load-balancing loss (equation 1), which is added to the contrastive
    loss.

    coefficient · mean over MoE layers of E · Σ_e r_e · p_e, with r_e the share of routed tokens
    that expert e got and p_e its mean routing probability: the coefficient itself where all experts
    are used alike. E and the mean over layers, which equation 1 leaves out, are the released
    code's. That code adds one such loss of the queries and one of the documents, which is twice as
    strong at the same coefficient; here it is one, of all texts of the global batch.
    """

    coefficient: float = Field(default=1.0, ge=0.0)
    """Weight α of the loss (section 4.3); the released finetuning configuration has 0."""
    count_padding: bool = False
    """Whether padding counts as tokens. True, as released: every text is padded to the maximum
    length of its role, and experts and statistics include padding. It costs as much as texts of
    full length."""


class ExpertsConfig(Settings):
    """Settings of mixture-of-experts layers, and of their initialisation from a dense model
    (section 4.3).
    """

    num_experts: PositiveInt = 8
    """Number of experts E."""
    top_k: PositiveInt = 2
    """Experts for each token; 1 is Switch routing (section 7.1). Their weights are the router's
    probabilities, not renormalised."""
    every: PositiveInt = 2
    """Layer interval of mixtures. 2: every other MLP, from the second layer; 1: all (Table 7)."""
    start: Literal["preserving", "released", "random"] = "preserving"
    """Initialisation of experts from dense MLPs. `preserving`: the model's outputs are unchanged.
    Experts keep the dense biases, their output is scaled by E / top_k, and the router is near zero,
    so that it routes evenly. `released`: as in Nomic's code, though not described, the dense biases
    are dropped and the outputs are not scaled, so that the branch starts at a fraction of its size.
    `random`: as `preserving`, but each expert's matrices are drawn anew, with the standard
    deviation of the start model's `initializer_range` (0.02 where its config.json has none), and
    all their biases are 0: what sparse upcycling (arXiv 2212.05055) is compared with. A start model
    that has experts keeps them, whatever stands here."""
    balance: BalanceConfig = BalanceConfig()

    @model_validator(mode="after")
    def _enough_experts(self) -> "ExpertsConfig":
        if self.top_k > self.num_experts:
            raise ValueError(
                f"experts.top_k {self.top_k} exceeds experts.num_experts {self.num_experts}"
            )
        return self


class NomicMoeConfig(ArchitectureConfig):
    """Settings of a BERT-like encoder with rotary positions, in which some MLPs are mixtures of
    experts.
    """

    architecture: ClassVar[str] = "rayembed.models.nomic_moe.architecture:NOMIC_MOE"
    prompt_table: ClassVar[str | None] = "nomic"

    kind: Literal["nomic-moe"] = "nomic-moe"
    backbone: BackboneConfig
    """BERT, RoBERTa or XLM-R, whose absolute positions are replaced by rotary ones, or a
    NomicBert, dense or with these experts already."""
    experts: ExpertsConfig | None = ExpertsConfig()
    """Mixture settings; None keeps all MLPs dense."""
    rotary_base: PositiveFloat = 10_000.0
    """Base of the rotary positions (Table 2); a NomicBert must have the same."""
    dimensions: tuple[PositiveInt, ...] = ()
    """Embedding widths besides the full one; a stage trains them by `loss.dimensions` (section 4.5:
    256)."""
    query_prefix: str = SEARCH_PREFIXES[0]
    """Text before every query without an instruction; an instruction replaces it."""
    document_prefix: str = SEARCH_PREFIXES[1]
    """Text before every document without an instruction; an instruction replaces it."""

    @property
    def template(self) -> str:
        """Template of an instruction: the instruction alone, which replaces the role's prefix."""
        return "{instruction}"

    @property
    def num_experts(self) -> int:
        """Number of experts in each mixture layer; 0 for dense MLPs."""
        return 0 if self.experts is None else self.experts.num_experts

    @property
    def offered_dimensions(self) -> tuple[int, ...]:
        """Truncated vector widths from the settings."""
        return self.dimensions

    @property
    def has_head(self) -> bool:
        """False, because mean pooling has no weights."""
        return False

    @property
    def description(self) -> str:
        """Description of the model for people: its architecture and its experts."""
        if self.experts is None:
            return "A dense encoder with rotary positions and mean pooling"
        return (
            f"An encoder with rotary positions and {self.experts.num_experts} experts, of which a "
            f"token takes {self.experts.top_k}, and mean pooling (Nomic Embed v2, arXiv 2502.07972)"
        )

    @model_validator(mode="after")
    def _dimensions_fall(self) -> "NomicMoeConfig":
        if list(self.dimensions) != sorted(set(self.dimensions), reverse=True):
            raise ValueError(
                f"dimensions {self.dimensions} must be distinct and in descending order"
            )
        return self
