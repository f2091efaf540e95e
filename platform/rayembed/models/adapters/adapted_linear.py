"""Frozen linear layer and its low-rank adapter, fused into one operation that stores less for the
backward pass.

y = W x + b + s B A d(x), with the dropout d. T tokens, I inputs, O outputs, R rank.

peft's layer keeps for each backward pass, beside x, what dropout made of x and which numbers it
dropped, and writes B A d(x) twice before it is added. On GPUs x, (T, R) numbers and a bit of each
of x are kept (`adapter_bits`), and d(x) is never written. CPUs keep d(x) and what they multiplied x
by, which are the numbers that torch's dropout draws; so do GPUs on which Triton's kernels do not
work. The adapter's product is written first and the layer's product added to it within the matrix
product, which waits for its operations and not for memory.
"""

import math
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from rayembed.models.adapters.adapter_bits import kernels_work, share_kept

_OWNED: Any = torch.library.Library("rayembed", "FRAGMENT")  # type: ignore[no-untyped-call]
_OWNED.define(
    "adapted_linear(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale, "
    "float dropout) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_OWNED.define(
    "adapted_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor down, Tensor up, "
    "Tensor thin, Tensor drawn, float scale, float dropout, bool of_x) -> (Tensor, Tensor, Tensor)"
)

_kernels: Any = torch.ops.rayembed


class AdaptedLinear(Linear):  # type: ignore[misc] # peft has no types
    """peft's LoRA layer with a faster, fused forward pass, used where the layer has one plain
    adapter and no hooks.

    Names, saving and merging are peft's.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output (…, O) for inputs (…, I), in the inputs' dtype or autocast's."""
        base = self.get_base_layer()
        if args or kwargs or not self._alone(base):
            out: Tensor = super().forward(x, *args, **kwargs)
            return out
        (name,) = self.active_adapters
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        dtype, kind = base.weight.dtype, x.device.type
        if kind != "meta" and dtype != torch.float64 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        drop = self.lora_dropout[name]
        out, *_ = torch.ops.rayembed.adapted_linear(
            *(value if value is None else value.to(dtype) for value in (x, base.weight, base.bias)),
            *(down.to(dtype), up.to(dtype)),
            self.scaling[name],
            drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0,
        )
        return out

    def _alone(self, base: Any) -> bool:
        """Whether the output depends only on the layer's weights and one plain adapter, so that the
        fused operation may replace peft's.

        A layer with hooks must be called: an engine that partitions weights gathers them there.
        """
        names = self.active_adapters
        if len(names) != 1 or names[0] not in self.lora_A or self.lora_bias[names[0]]:
            return False
        return (
            type(base) is nn.Linear
            and not any(map(_has_hooks, (base, self.lora_A[names[0]], self.lora_B[names[0]])))
            and not any(p.requires_grad for p in base.parameters())
            and not (self.disable_adapters or self.merged or self.lora_variant)
        )


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return any((*hooks, module._backward_hooks, module._backward_pre_hooks))


def keeps_bits(x: Tensor, rank: int) -> bool:
    """Whether dropout is stored for the backward pass as one bit per input (on GPUs), instead of as
    the multiplied inputs and their factors.
    """
    if x.device.type == "cuda":
        return kernels_work(x.device, x.dtype, rank)
    return x.device.type == "meta"


def computed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the output (…, O), the adapter's inner product A d(x) of shape (T, R), and what the
    backward pass needs to repeat the dropout d: bits, or factors and d(x).

    All of one dtype.
    """
    drawn, kept = x.new_empty(0), x.new_empty(0)
    flat = x.reshape(-1, x.shape[-1])
    if dropout and keeps_bits(x, down.shape[0]):
        # On the device, so that the host does not wait, and a generator's state repeats it.
        seed = torch.empty(1, dtype=torch.int64, device=x.device).random_()
        keep = share_kept(dropout)
        drawn = _kernels.draw_bits(seed, *flat.shape, keep)
        thin = _kernels.kept_down(flat, drawn, down, keep)
    elif dropout:
        # As torch's dropout on CPUs draws and multiplies.
        drawn = torch.empty_like(x).bernoulli_(1 - dropout).div_(1 - dropout)
        kept = x * drawn
        thin = torch.mm(kept.view_as(flat), down.t())
    else:
        thin = torch.mm(flat, down.t())
    if bias is None:
        out = torch.mm(thin * scale, up.t())
    else:
        out = torch.addmm(bias, thin, up.t(), alpha=scale)
    out.addmm_(flat, weight.t())
    return out.view(*x.shape[:-1], weight.shape[0]), thin, drawn, kept


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    thin: Tensor,
    drawn: Tensor,
    scale: float,
    dropout: float,
    of_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x (optional), A and B from the gradient of the output.

    Args:
        x: of the forward pass; d(x) where that is kept.
        drawn: bits, or what multiplied x.
    """
    grad, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    of_thin = torch.mm(grad, up) * scale
    of_up = torch.mm(grad.t(), thin) * scale
    if _are_bits(drawn):
        keep = share_kept(dropout)
        of_down = _kernels.kept_of_down(of_thin, flat, drawn, keep).sum(0).to(down.dtype)
    else:
        of_down = torch.mm(of_thin.t(), flat)
    if not of_x:
        return x.new_empty(0), of_down, of_up
    if _are_bits(drawn):
        found = _kernels.kept_of_input(of_thin, down, drawn, keep)
    else:
        found = torch.mm(of_thin, down)
        if dropout:
            found.mul_(drawn.view_as(found))
    found.addmm_(grad, weight)
    return found.view(x.shape), of_down, of_up


def _are_bits(drawn: Tensor) -> bool:
    return drawn.dtype == torch.uint8


def _shapes(
    x: Tensor, weight: Tensor, bias: Any, down: Tensor, up: Tensor, scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    thin = x.new_empty(math.prod(x.shape[:-1]), down.shape[0])
    if dropout and keeps_bits(x, down.shape[0]):
        bits = x.new_empty(thin.shape[0], (x.shape[-1] + 7) // 8, dtype=torch.uint8)
        return out, thin, bits, x.new_empty(0)
    drawn, kept = ((torch.empty_like(x) if dropout else x.new_empty(0)) for _ in range(2))
    return out, thin, drawn, kept


def _shapes_of_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    thin: Tensor,
    drawn: Tensor,
    scale: float,
    dropout: float,
    of_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_input = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else x.new_empty(0)
    )
    return of_input, torch.empty_like(down), torch.empty_like(up)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, down, up, scale, dropout = inputs
    _, thin, drawn, kept = output
    of_down = kept if dropout and not _are_bits(drawn) else x
    ctx.save_for_backward(of_down, weight, down, up, thin, drawn)
    ctx.settings = scale, dropout
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_x = ctx.needs_input_grad[0]
    found, of_down, of_up = torch.ops.rayembed.adapted_linear_backward(
        grad, *ctx.saved_tensors, *ctx.settings, of_x
    )
    return found if of_x else None, None, None, of_down, of_up, None, None


def _second(*_: Any) -> None:
    raise NotImplementedError("layers with adapters do not support second derivatives")


_OWNED.impl("adapted_linear", computed, "CompositeExplicitAutograd")
_OWNED.impl("adapted_linear_backward", gradients, "CompositeExplicitAutograd")
torch.library.register_fake("rayembed::adapted_linear", _shapes, lib=_OWNED)
torch.library.register_fake("rayembed::adapted_linear_backward", _shapes_of_gradients, lib=_OWNED)
torch.library.register_autograd(
    "rayembed::adapted_linear", _backward, setup_context=_keep, lib=_OWNED
)
torch.library.register_autograd("rayembed::adapted_linear_backward", _second, lib=_OWNED)
