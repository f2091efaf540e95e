"""Nomic Embed v2 MoE: mean-pooled states of a mixture-of-experts encoder (arXiv 2502.07972)."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.nomic_moe import BalanceConfig, NomicMoeConfig
from rayembed.errors import ConfigError
from rayembed.models.contract import EmbedOutput, Role, Tokens
from rayembed.models.masked_mean import masked_mean
from rayembed.models.nomic_moe_encoder import EncoderShape, NomicEncoder, Statistics
from rayembed.models.tokens import PrefixTokenizer
from rayembed.models.transformer_model import TransformerModel


class NomicMoeTokenizer(PrefixTokenizer):
    """Tokenizer of prefix and text with the model's own special tokens, all of which are pooled.

    An instruction, such as `clustering: `, stands in place of the role's prefix. Where padding
    counts for the experts, tokens in training are those of the full length, padding included;
    vectors are the same without it.
    """

    def __init__(self, pretrained: Any, config: NomicMoeConfig) -> None:
        super().__init__(pretrained, config, pool_prompt=True)
        self._counts_padding = config.experts is not None and config.experts.balance.count_padding
        self._pads = False

    def in_training(self) -> "NomicMoeTokenizer":
        """Tokenizer for training; see `TrainingTokenizer`."""
        changed = copy.copy(self)
        changed._pads = self._counts_padding
        return changed

    def prompt(self, instruction: str, role: Role) -> str:
        """Literal prompt: the instruction unchanged, or the role's prefix without one."""
        return instruction or self.prefixes[role]

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokens of each text with its literal prompt before it; see `PromptTokenizer`."""
        made = super().with_prompts(texts, prompts, role, allow_empty=allow_empty)
        if not self._pads:
            return made
        return [self._padded(one, self.max_lengths[role]) for one in made]

    def _padded(self, tokens: Tokens, length: int) -> Tokens:
        missing = length - len(tokens["input_ids"])
        return {
            "input_ids": np.pad(tokens["input_ids"], (0, missing), constant_values=self.pad_id),
            "pool_mask": np.pad(tokens["pool_mask"], (0, missing)),
        }

    def collate(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate `input_ids`, `attention_mask`, `pool_mask` as other models, and `counted`.

        `counted` (B, longest) int64 is zero where experts see nothing.
        """
        batch = super().collate(tokens)
        counted = batch["attention_mask"]
        return {**batch, "attention_mask": batch["pool_mask"].long(), "counted": counted}


class NomicMoe(TransformerModel):
    """Normalised mean of the encoder's states, with router statistics."""

    config: NomicMoeConfig
    backbone: NomicEncoder
    tokenizer: NomicMoeTokenizer

    def __init__(
        self, config: NomicMoeConfig, backbone: NomicEncoder, tokenizer: NomicMoeTokenizer
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.dimensions = dimensions_of(config, backbone.config)

    @property
    def head(self) -> nn.Module:
        """Module without weights, as the mean has none."""
        return nn.Identity()

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Unit vectors (B, D) of a collated micro-batch and, in training, statistics; no context.

        `occurrences` (B,) in the batch, where it is there, says how often each text counts.
        """
        output = self.backbone(
            batch["input_ids"],
            batch["attention_mask"],
            batch.get("counted"),
            batch.get("occurrences"),
        )
        pooled = masked_mean(output.last_hidden_state, batch["pool_mask"])
        return EmbedOutput(functional.normalize(pooled, dim=-1), output.statistics)

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """Balance loss from statistics summed over the global batch (see `BalanceConfig`)."""
        assert self.config.experts is not None
        return balance_loss(
            self._statistics(statistics),
            top_k=self.backbone.config.top_k,
            settings=self.config.experts.balance,
        )

    def statistics_metrics(self, statistics: Tensor) -> dict[str, float]:
        """Log metrics of the routers; see `router_metrics`."""
        shape = self.backbone.config
        return router_metrics(self._statistics(statistics.detach()), shape.moe_layers)

    def _statistics(self, packed: Tensor) -> Statistics:
        shape = self.backbone.config
        return Statistics.of(packed, len(shape.moe_layers), shape.num_experts)


def balance_loss(statistics: Statistics, *, top_k: int, settings: BalanceConfig) -> Tensor:
    """Coefficient · mean over layers of E · Σ_e r_e · p_e (equation 1; see `BalanceConfig`)."""
    num_experts = statistics.load.shape[1]
    routed = statistics.load.detach() / (statistics.tokens.detach() * top_k)
    probability = statistics.probability / statistics.tokens.detach()
    by_layer = num_experts * (routed * probability).sum(dim=1)  # (L,)
    return settings.coefficient * by_layer.mean()


def router_metrics(statistics: Statistics, layers: Sequence[int]) -> dict[str, float]:
    """Step metrics: averages over layers and, by layer, the share of each expert.

    `experts/balance` is the balance loss at coefficient 1, 1 where all are used alike;
    `experts/largest_share` and `experts/smallest_share` are of the routed tokens of a layer;
    `experts/dead` counts experts of any layer that got no token; `experts/router_entropy` is the
    mean entropy of a token's probabilities, as a share of the largest possible.
    """
    num_experts = statistics.load.shape[1]
    share = statistics.load / statistics.load.sum(dim=1, keepdim=True)
    probability = statistics.probability / statistics.tokens
    balance = num_experts * (share * probability).sum(dim=1).mean()
    entropy = (statistics.entropy / statistics.tokens).mean() / np.log(max(num_experts, 2))
    found = {
        "experts/balance": float(balance),
        "experts/largest_share": float(share.max()),
        "experts/smallest_share": float(share.min()),
        "experts/dead": float((statistics.load == 0).sum()),
        "experts/router_entropy": float(entropy),
    }
    for layer, shares in zip(layers, share.tolist(), strict=True):
        for expert, value in enumerate(shares):
            found[f"experts/layer_{layer}/share_{expert}"] = value
    return found


def dimensions_of(config: NomicMoeConfig, shape: EncoderShape) -> tuple[int, ...]:
    """Widths of the vectors, the full one first.

    Raises:
        ConfigError: one to cut at is not below the full one.
    """
    wrong = [width for width in config.dimensions if width >= shape.hidden_size]
    if wrong:
        raise ConfigError(
            f"model.dimensions names {wrong}, but vectors are {shape.hidden_size} wide in full; "
            "name widths below that"
        )
    return (shape.hidden_size, *config.dimensions)
