"""A frozen linear layer with a low-rank adapter as one operation, without masks and copies.

y = W x + b + s B A d(x), with the dropout d. T tokens, I inputs, O outputs, R rank.

peft's layer keeps for each backward pass, beside x, what dropout made of x and which numbers it
dropped, and writes B A d(x) twice before it is added. On GPUs x and (T, R) numbers are kept, and
dropout's numbers are drawn a second time in the backward pass, from the generator's state of the
first time. CPUs, which take longer to draw than to keep, keep d(x) and what they multiplied x by.
The numbers are those that torch's dropout draws. The adapter's product is written first and the
layer's product added to it within the matrix product, which waits for its operations and not for
memory.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

_OWNED: Any = torch.library.Library("rayembed", "FRAGMENT")  # type: ignore[no-untyped-call]
_OWNED.define(
    "adapted_linear(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale, "
    "float dropout) -> (Tensor, Tensor, Tensor, Tensor)"
)
_OWNED.define(
    "adapted_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor down, Tensor up, "
    "Tensor thin, Tensor drawn, float scale, float dropout, bool of_x) -> (Tensor, Tensor, Tensor)"
)


class AdaptedLinear(Linear):  # type: ignore[misc] # peft has no types
    """peft's layer, whose forward pass is one operation where nothing but its own weights matter.

    Names, saving and merging are peft's.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output (…, O) of inputs (…, I), in their dtype or that of autocast."""
        base = self.get_base_layer()
        if args or kwargs or not self._alone(base):
            out: Tensor = super().forward(x, *args, **kwargs)
            return out
        (name,) = self.active_adapters
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        dtype, kind = base.weight.dtype, x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
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
        """Whether the layer's output is that of its weights and one plain adapter.

        A layer with hooks must be called: an engine that partitions weights gathers them there.
        """
        return (
            type(base) is nn.Linear
            and not (base._forward_hooks or base._forward_pre_hooks)
            and not any(p.requires_grad for p in base.parameters())
            and not (self.disable_adapters or self.merged or self.lora_variant)
            and len(self.active_adapters) == 1
        )


def redraws(x: Tensor) -> bool:
    """Whether dropout's numbers are drawn again in the backward pass, not kept."""
    return x.device.type != "cpu"


def computed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output (…, O), A d(x) of (T, R), and what the backward pass has of dropout: the
    generator's state and nothing, or what multiplied x and d(x).

    All of one dtype.
    """
    drawn, kept = x.new_empty(0), x.new_empty(0)
    dropped = x
    if dropout and redraws(x):
        drawn = _generator(x).get_state()
        dropped = torch.native_dropout(x, dropout, True)[0]
    elif dropout:
        # As torch's dropout on CPUs draws and multiplies.
        drawn = torch.empty_like(x).bernoulli_(1 - dropout).div_(1 - dropout)
        dropped = kept = x * drawn
    thin = torch.mm(dropped.flatten(0, -2), down.t())
    if bias is None:
        out = torch.mm(thin * scale, up.t())
    else:
        out = torch.addmm(bias, thin, up.t(), alpha=scale)
    out.addmm_(x.flatten(0, -2), weight.t())
    return out.view(*x.shape[:-1], -1), thin, drawn, kept


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
    """Gradients of x (or nothing), A and B by that of the output.

    Args:
        x: of the forward pass; where CPUs drop, d(x).
    """
    grad = grad.flatten(0, -2)
    of_thin = torch.mm(grad, up) * scale
    of_up = torch.mm(grad.t(), thin) * scale
    mask, dropped = drawn, x
    if dropout and redraws(x):
        dropped, mask = _dropped_again(x, drawn, dropout)
    of_down = torch.mm(of_thin.t(), dropped.flatten(0, -2))
    if not of_x:
        return x.new_empty(0), of_down, of_up
    found = torch.mm(of_thin, down).view(x.shape)
    if dropout and redraws(x):
        found = torch.ops.aten.native_dropout_backward(found, mask, 1 / (1 - dropout))
    elif dropout:
        found.mul_(mask)
    found.view(-1, x.shape[-1]).addmm_(grad, weight)
    return found, of_down, of_up


def _generator(x: Tensor) -> torch.Generator:
    if x.device.type == "cuda":
        return torch.cuda.default_generators[x.device.index]
    return torch.default_generator


def _dropped_again(x: Tensor, state: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """What dropout made of x and its mask, drawn from a state; the generator goes on as before."""
    generator = _generator(x)
    now = generator.get_state()
    generator.set_state(state)
    dropped, mask = torch.native_dropout(x, dropout, True)
    generator.set_state(now)
    return dropped, mask


def _state_bytes(x: Tensor) -> int:
    return 16 if x.device.type == "cuda" else 5056


def _shapes(
    x: Tensor, weight: Tensor, bias: Any, down: Tensor, up: Tensor, scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    thin = x.new_empty(x.flatten(0, -2).shape[0], down.shape[0])
    if dropout and redraws(x):
        state = torch.empty(_state_bytes(x), dtype=torch.uint8, device="cpu")
        return out, thin, state, x.new_empty(0)
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
    ctx.save_for_backward(x if redraws(x) or not dropout else kept, weight, down, up, thin, drawn)
    ctx.settings = scale, dropout
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_x = ctx.needs_input_grad[0]
    found, of_down, of_up = torch.ops.rayembed.adapted_linear_backward(
        grad, *ctx.saved_tensors, *ctx.settings, of_x
    )
    return found if of_x else None, None, None, of_down, of_up, None, None


_OWNED.impl("adapted_linear", computed, "CompositeExplicitAutograd")
_OWNED.impl("adapted_linear_backward", gradients, "CompositeExplicitAutograd")
torch.library.register_fake("rayembed::adapted_linear", _shapes, lib=_OWNED)
torch.library.register_fake("rayembed::adapted_linear_backward", _shapes_of_gradients, lib=_OWNED)
torch.library.register_autograd(
    "rayembed::adapted_linear", _backward, setup_context=_keep, lib=_OWNED
)
