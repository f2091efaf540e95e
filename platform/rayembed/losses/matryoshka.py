"""Vectors whose first dimensions are vectors too (Matryoshka, arXiv 2205.13147)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def cut(vectors: Float[Tensor, "... D"], dimension: int) -> Float[Tensor, "... d"]:
    """The first dimensions, of unit length again; vectors of that width come back as they are."""
    if vectors.shape[-1] == dimension:
        return vectors
    return functional.normalize(vectors[..., :dimension], dim=-1)
