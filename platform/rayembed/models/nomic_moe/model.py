"""Nomic Embed v2 MoE: mean-pooled states of a mixture-of-experts encoder (arXiv 2502.07972)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayembed.errors import ConfigError
from rayembed.models.attention.packed import Packed
from rayembed.models.attention.unpadded import why_not_alike
from rayembed.models.contract import EmbedOutput
from rayembed.models.nomic_moe.config import BalanceConfig, NomicMoeConfig
from rayembed.models.nomic_moe.encoder import NomicEncoder, Statistics
from rayembed.models.nomic_moe.shape import EncoderShape
from rayembed.models.nomic_moe.tokens import NomicMoeTokenizer
from rayembed.models.pooling import masked_mean
from rayembed.models.transformer_model import TransformerModel


class NomicMoe(TransformerModel):
    """Embedding model: the normalised mean of the encoder's states, with router statistics in
    training.
    """

    config: NomicMoeConfig
    backbone: NomicEncoder
    tokenizer: NomicMoeTokenizer
    takes_packed = True

    def __init__(
        self, config: NomicMoeConfig, backbone: NomicEncoder, tokenizer: NomicMoeTokenizer
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.dimensions = dimensions_of(config, backbone.config)

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Embed a collated micro-batch to unit vectors (B, D), in training with router statistics;
        `context` must be None.

        `occurrences` (B,) in the batch, where it is there, says how often each text counts.
        """
        packed, occurrences = Packed.of(batch), batch.get("occurrences")
        if packed is None:
            output = self.backbone(
                batch["input_ids"],
                batch["attention_mask"],
                batch.get("counted"),
                occurrences,
                batch.get("seen"),
            )
        else:
            output = self.backbone.forward_packed(
                batch["input_ids"], packed, batch["position_ids"], occurrences
            )
        pooled = masked_mean(output.last_hidden_state, batch["pool_mask"], packed)
        return EmbedOutput(functional.normalize(pooled, dim=-1), output.statistics)

    def known_ahead(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Precompute the indices of the tokens that the experts process in a padded batch; see
        `EmbeddingModel`.
        """
        counted = batch.get("counted")
        return {} if counted is None else {"seen": counted.flatten().nonzero().squeeze(1)}

    def why_padded(self) -> str | None:
        """Return the reason why texts must be padded, see `TransformerModel`."""
        experts = self.config.experts
        if self.training and experts is not None and experts.balance.count_padding:
            return "padding counts for the experts"
        backbone = self.backbone

        def alone(ids: Tensor) -> Tensor:
            row = ids.unsqueeze(0)
            states: Tensor = backbone(row, torch.ones_like(row)).last_hidden_state
            return states.squeeze(0)

        def together(ids: Tensor, packed: Packed, positions: Tensor) -> Tensor:
            return backbone.forward_packed(ids, packed, positions).last_hidden_state

        return why_not_alike("backbone", backbone, alone, together, longest=9)

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """Compute the balance loss from statistics summed over the global batch (see
        `BalanceConfig`).
        """
        assert self.config.experts is not None
        return balance_loss(
            self._statistics(statistics),
            top_k=self.backbone.config.top_k,
            settings=self.config.experts.balance,
        )

    def statistics_metrics(self, statistics: Tensor) -> dict[str, float]:
        """Compute metrics of the routers for the log; see `router_metrics`."""
        shape = self.backbone.config
        return router_metrics(self._statistics(statistics.detach()), shape.moe_layers)

    def _statistics(self, packed: Tensor) -> Statistics:
        shape = self.backbone.config
        return Statistics.of(packed, len(shape.moe_layers), shape.num_experts)


def balance_loss(statistics: Statistics, *, top_k: int, settings: BalanceConfig) -> Tensor:
    """Load-balancing loss: coefficient · mean over layers of E · Σ_e r_e · p_e (equation 1; see
    `BalanceConfig`).
    """
    num_experts = statistics.load.shape[1]
    routed = statistics.load.detach() / (statistics.tokens.detach() * top_k)
    probability = statistics.probability / statistics.tokens.detach()
    by_layer = num_experts * (routed * probability).sum(dim=1)  # (L,)
    return settings.coefficient * by_layer.mean()


def router_metrics(statistics: Statistics, layers: Sequence[int]) -> dict[str, float]:
    """Compute the router's metrics for the log: averages over layers, and each expert's share of
    tokens by layer.

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
    """Return the widths of the vectors, the full width first.

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
