"""Matryoshka embeddings: vectors whose leading dimensions are vectors too (arXiv 2205.13147)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def cut(vectors: Float[Tensor, "... D"], dimension: int) -> Float[Tensor, "... d"]:
    """Leading dimensions, renormalised; vectors of that width are returned unchanged."""
    if vectors.shape[-1] == dimension:
        return vectors
    return functional.normalize(vectors[..., :dimension], dim=-1)
