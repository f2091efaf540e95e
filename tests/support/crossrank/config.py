"""Settings of a cross-encoder, and its loss; neither imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.loss import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


class CrossEncoderConfig(ArchitectureConfig):
    """An encoder that reads query and document together and gives one score (arXiv 1901.04085)."""

    architecture: ClassVar[str] = "crossrank.model:CROSS_ENCODER"
    embeds: ClassVar[bool] = False

    kind: Literal["pair_scorer"] = "pair_scorer"


class PairCrossEntropy(LossConfig):
    """Binary cross-entropy of each pair's score (arXiv 1901.04085, equation 1)."""

    kind: Literal["pair_cross_entropy"] = "pair_cross_entropy"
    positive_weight: PositiveFloat = 1.0
    """Factor of the relevant pairs, of which there are fewer."""

    def of_scores(self, scores: Tensor, relevant: Tensor) -> Tensor:
        """(P,) loss of each pair from its score and whether it is relevant, both (P,)."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        weight = scores.new_tensor(self.positive_weight)
        return binary_cross_entropy_with_logits(
            scores, relevant, reduction="none", pos_weight=weight
        )
