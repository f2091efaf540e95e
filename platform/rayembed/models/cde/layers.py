"""CDE's randomly initialised layers beside its two transformers (arXiv 2410.02525).

k the first stage's width, h the second's, S soft prompts.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rayembed.models.cde.config import CDEConfig


class ContextLayers(nn.Module):
    """MLPs of both stages, the null token and the soft prompts; called one by one.

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
        """Context vectors, float32, from the first stage's means."""
        vectors: Tensor = self.first(means.to(self.null.dtype))
        return vectors.float()

    def soft_prompts(self) -> Float[Tensor, "S h"]:
        """Soft prompt vectors between context and text: an MLP of ones, as released."""
        if self.prompts is None:
            return self.null.new_empty(0, len(self.null))
        ones = self.null.new_ones(len(self.null))
        prompts: Tensor = self.prompts(ones)
        return prompts.view(-1, len(self.null))

    def embedding(self, mean: Float[Tensor, "batch h"]) -> Float[Tensor, "batch h"]:
        """Embedding, float32 and not normalised, from the mean over the text's states."""
        if self.output is None:
            return mean
        projected: Tensor = self.output(mean.to(self.null.dtype)).float()
        return projected + mean if self._residual else projected


def _relu_mlp(width: int, out_width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out_width))
