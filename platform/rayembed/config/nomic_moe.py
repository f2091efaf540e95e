"""Settings of Nomic Embed v2: an encoder with rotary positions and experts (arXiv 2502.07972)."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.backbone import BackboneConfig
from rayembed.config.settings import Settings

SEARCH_PREFIXES = ("search_query: ", "search_document: ")
"""What stands before queries and before documents (section 5.3)."""


class BalanceConfig(Settings):
    """The loss that keeps the experts in use (equation 1), added to the contrastive one.

    coefficient · mean over MoE layers of E · Σ_e r_e · p_e, with r_e the share of routed tokens
    that expert e got and p_e its mean routing probability: the coefficient itself where all experts
    are used alike. E and the mean over layers, which equation 1 leaves out, are the released
    code's. That code adds one such loss of the queries and one of the documents, which is twice as
    strong at the same coefficient; here it is one, of all texts of the global batch.
    """

    coefficient: float = Field(default=1.0, ge=0.0)
    """α (section 4.3); the released finetuning configuration has 0."""
    count_padding: bool = False
    """True: as released, every text is padded to the maximum length of its role, and experts
    and statistics take padding for tokens. It costs as much as texts of full length."""


class ExpertsConfig(Settings):
    """Which MLPs are mixtures of experts, and how a dense model becomes one (section 4.3)."""

    num_experts: PositiveInt = 8
    """E."""
    top_k: PositiveInt = 2
    """Experts of a token; 1 is Switch routing (section 7.1). Their weights are the router's
    probabilities, which are not made to add up to one."""
    every: PositiveInt = 2
    """2: every other MLP, from the second layer; 1: all (Table 7)."""
    start: Literal["preserving", "released"] = "preserving"
    """How experts start where the backbone's MLPs are dense. `preserving`: the model computes what
    it did before. Experts keep the dense biases, their output is scaled by E / top_k, and the
    router starts so near zero that it routes evenly. `released`: as Nomic's code does without a
    word, the dense biases are dropped and the outputs are not scaled, so that the branch starts at
    a fraction of its size."""
    balance: BalanceConfig = BalanceConfig()

    @model_validator(mode="after")
    def _enough_experts(self) -> "ExpertsConfig":
        if self.top_k > self.num_experts:
            raise ValueError(
                f"experts.top_k {self.top_k} exceeds experts.num_experts {self.num_experts}"
            )
        return self


class NomicMoeConfig(Settings):
    """A BERT-like encoder with rotary positions, of which some MLPs are mixtures of experts."""

    kind: Literal["nomic-moe"] = "nomic-moe"
    backbone: BackboneConfig
    """BERT, RoBERTa or XLM-R, whose absolute positions are replaced by rotary ones, or a
    NomicBert, dense or with these experts already."""
    experts: ExpertsConfig | None = ExpertsConfig()
    """None: all MLPs stay dense."""
    rotary_base: PositiveFloat = 10_000.0
    """Of the rotary positions (Table 2); a NomicBert must have the same."""
    dimensions: tuple[PositiveInt, ...] = ()
    """Widths besides the full one at which vectors may be cut; a stage learns them by
    `loss.dimensions` (section 4.5: 256)."""
    query_prefix: str = SEARCH_PREFIXES[0]
    """Put before every query without an instruction; an instruction stands in its place."""
    document_prefix: str = SEARCH_PREFIXES[1]
    """As `query_prefix`, for documents."""
    query_max_length: PositiveInt = 512
    """Tokens, special ones included."""
    document_max_length: PositiveInt = 512
    """Tokens, special ones included."""

    @property
    def lora(self) -> None:
        """No adapters: all weights are trained."""
        return None

    @model_validator(mode="after")
    def _dimensions_fall(self) -> "NomicMoeConfig":
        if list(self.dimensions) != sorted(set(self.dimensions), reverse=True):
            raise ValueError(f"dimensions {self.dimensions} must be distinct, the widest first")
        return self
