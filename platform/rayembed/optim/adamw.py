"""AdamW: Adam with decoupled weight decay."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from rayembed.config.optimizer import OptimizerConfig

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
STATES = ("exp_avg", "exp_avg_sq")
"""Torch's names of the running means of the gradient and of its square."""


class AdamW(OptimizerConfig):
    """AdamW (arXiv 1711.05101), in torch's fused kernels.

    It is what an optimiser without `kind` is, and is written without.
    """

    kind: Literal["adamw"] = Field(default="adamw", exclude=True)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Constant added to the root of the running mean of the square."""

    def states(self, *, matrix: bool) -> tuple[str, ...]:
        """Names that torch gives to AdamW's two running means."""
        return STATES

    def build(self, groups: list[dict[str, Any]], *, bfloat16: bool) -> Any:
        """Make a `torch.optim.AdamW` that updates each parameter group in one fused kernel."""
        import torch

        return torch.optim.AdamW(groups, betas=self.betas, eps=self.eps, fused=True)
