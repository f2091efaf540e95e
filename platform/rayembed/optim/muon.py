"""Muon: orthogonalised momentum for matrices, AdamW for everything else."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rayembed.config.optimizer import OptimizerConfig
from rayembed.optim.adamw import STATES, Decay


class Muon(OptimizerConfig):
    """Muon (Keller Jordan, kellerjordan.github.io/posts/muon) with updates of AdamW's size
    (Moonlight, arXiv 2502.16982), so that learning rates and weight decay of AdamW can be reused.

    It updates the weights of linear layers in the backbone. Embeddings, vectors, layers outside the
    backbone, experts that stand in one tensor and parameters of a loss are AdamW's, at the same
    learning rates. The iteration computes in the model's number type.
    """

    kind: Literal["muon"] = "muon"
    momentum: Decay = 0.95
    """Decay rate of the Nesterov momentum."""
    iterations: PositiveInt = 5
    """Number of Newton-Schulz iterations of an update."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's running means."""
    eps: PositiveFloat = Field(default=1e-8)
    """AdamW's constant added to the root of the running mean of the square."""

    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2)
    why_not: ClassVar[str] = (
        "Muon needs each matrix whole, and stage 3 hands every worker a slice of each of them, so "
        "that all workers would have to repeat all of its work"
    )
    state_bytes: ClassVar[int] = 8  # one momentum; 12 for the share of AdamW
    splits_matrices: ClassVar[bool] = True

    def states(self, *, matrix: bool) -> tuple[str, ...]:
        """Names of the optimiser states: the momentum of a matrix, or AdamW's running means of any
        other tensor.
        """
        return ("momentum_buffer",) if matrix else STATES

    def build(self, groups: list[dict[str, Any]], *, bfloat16: bool) -> Any:
        """Make the optimiser `optim.orthogonal.MuonAdamW`."""
        from rayembed.optim.orthogonal import MuonAdamW

        return MuonAdamW(
            groups,
            momentum=self.momentum,
            iterations=self.iterations,
            betas=self.betas,
            eps=self.eps,
            bfloat16=bfloat16,
        )
