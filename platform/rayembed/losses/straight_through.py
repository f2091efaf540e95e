"""Use quantised vectors in a loss: scores as the stored vectors will give them, gradients as if
nothing were rounded.

Rounding has no useful derivative. The straight-through estimator (arXiv 1308.3432) takes that of
the identity instead: the gradient of a loss by the quantised vector is that by the vector.
Components that int8 cuts at the end of its range get none: no small change changes their code.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rayembed.config.loss import LossConfig
from rayembed.config.types import Precision
from rayembed.machine.quantisation import LEVELS, bit_value, int8_step


class View(NamedTuple):
    """Form in which a loss compares vectors: number of dimensions and number type."""

    width: int
    precision: Precision


def views_of(loss: LossConfig, full: int) -> list[View]:
    """List all forms in which a loss compares vectors: each width, the full one first, in float32
    and each further number type.
    """
    precisions: tuple[Precision, ...] = ("float32", *loss.precisions)
    return [View(d, precision) for d in (full, *loss.dimensions) for precision in precisions]


def seen(vectors: Float[Tensor, "... D"], view: View) -> Float[Tensor, "... d"]:
    """Convert unit vectors to the form of a view: truncated and quantised."""
    return straight_through(cut(vectors, view.width), view.precision)


def straight_through(
    vectors: Float[Tensor, "... D"], precision: Precision
) -> Float[Tensor, "... D"]:
    """Quantise vectors exactly as `quantisation.quantised` does, but pass gradients through
    unchanged.
    """
    match precision:
        case "float32":
            return vectors
        case "int8":
            found: Tensor = _Int8.apply(vectors.float())  # type: ignore[no-untyped-call]
        case "binary":
            found = _Signs.apply(vectors.float())  # type: ignore[no-untyped-call]
    return found


class _Int8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        step = int8_step(vectors.shape[-1])
        codes = torch.round(vectors * (1 / step))
        ctx.save_for_backward(codes.abs() <= LEVELS)
        return codes.clamp(-LEVELS, LEVELS) * step

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inside,) = ctx.saved_tensors
        given: Tensor = grads[0] * inside
        return given


class _Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        del ctx
        signs = (vectors > 0).float() * 2 - 1
        found: Tensor = signs * bit_value(vectors.shape[-1])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]


def cut(vectors: Float[Tensor, "... D"], dimension: int) -> Float[Tensor, "... d"]:
    """Truncate vectors to their first dimensions and renormalise them; vectors of that width stay
    unchanged.
    """
    if vectors.shape[-1] == dimension:
        return vectors
    return functional.normalize(vectors[..., :dimension], dim=-1)
