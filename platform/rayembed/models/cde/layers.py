"""Layers of CDE that are not part of its two transformers and start from random weights (arXiv
2410.02525).

k the first stage's width, h the second's, S soft prompts.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rayembed.models.cde.config import CDEConfig


class ContextLayers(nn.Module):
    """MLPs after both encoders, the null token and the soft prompts; the model calls them
    separately.

    The weights have the names that jxm/cde-small-v1 and v2 give them below their stages.
    """

    def __init__(self, config: CDEConfig, first_width: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(first_width, first_width), nn.GELU(), nn.Linear(first_width, width)
        )
        self.null = nn.Parameter(torch.randn(width) * 0.01)
        self.prompts: nn.Sequential | None = None
        if config.num_soft_prompts:
            self.prompts = _relu_mlp(width, config.num_soft_prompts * width)
        self.output: nn.Sequential | None = None
        if config.output != "mean":
            self.output = _relu_mlp(width, width)
        self._residual = config.output == "residual"

    def context(self, means: Float[Tensor, "rows k"]) -> Float[Tensor, "rows h"]:
        """Project the first encoder's mean states to context vectors, float32."""
        vectors: Tensor = self.first(means.to(self.null.dtype))
        return vectors.float()

    def soft_prompts(self) -> Float[Tensor, "S h"]:
        """Compute the soft prompt vectors between context and text, by an MLP of a vector of ones,
        as in the released code.
        """
        if self.prompts is None:
            return self.null.new_empty(0, len(self.null))
        ones = self.null.new_ones(len(self.null))
        prompts: Tensor = self.prompts(ones)
        return prompts.view(-1, len(self.null))

    def embedding(self, mean: Float[Tensor, "batch h"]) -> Float[Tensor, "batch h"]:
        """Project the mean of the text's states to its embedding, float32, not normalised."""
        if self.output is None:
            return mean
        projected: Tensor = self.output(mean.to(self.null.dtype)).float()
        return projected + mean if self._residual else projected


def _relu_mlp(width: int, out_width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out_width))
