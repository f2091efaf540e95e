"""Low-rank adapters on a backbone: added, identified, merged for export and for use."""

import math
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from rayembed.config.backbone import LoraConfig
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.models.adapters.adapter_bits import kernels_work, share_kept
from rayembed.models.kept_zeros import masked

_ADAPTER = "default"


def add_lora(backbone: nn.Module, config: LoraConfig, *, setting: str) -> None:
    """Add adapters to the named linear layers and freeze the rest of the backbone, in place.

    A starts from random numbers of the global CPU generator and B from zero, so that the
    backbone's output is unchanged at first. Adapters have the dtype of the layer they sit on. An
    encoder's own pooler, which no embedding uses, gets none.

    Args:
        setting: where the config stands, for messages.

    Raises:
        ConfigError: a name in `target_modules` that no linear layer has.
    """
    import peft

    linear = {
        name.rpartition(".")[2]
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("pooler.")
    }
    pooled = any(
        name.startswith("pooler.") and name.rpartition(".")[2] in config.target_modules
        for name, _ in backbone.named_modules()
    )
    for target in config.target_modules:
        if target not in linear:
            raise ConfigError(
                f"{setting}.target_modules names {target!r}, but the model has no linear layer of "
                f"that name; {nearest(target, linear)} (all: {', '.join(sorted(linear))})"
            )
    adapters = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        exclude_modules=r"pooler\..*" if pooled else None,
    )
    adapters._register_custom_module({nn.Linear: AdaptedLinear})
    peft.inject_adapter_in_model(adapters, backbone, adapter_name=_ADAPTER)
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_("lora_" in name)


@torch.no_grad()
def merge_lora(backbone: nn.Module) -> None:
    """Merge the adapters of a model that is trained no further into the layers beneath, in place.

    The weights are those of `merged_state`. What an adapter costs in each pass is gone: two thin
    products, a scale and an addition for each layer. No memory is taken for it but of weights that
    are mapped from a file, whose pages become this process's own.
    """
    for name, layer in list(backbone.named_modules()):
        if hasattr(layer, "lora_A"):
            base: Any = layer.base_layer
            base.weight.copy_(_merged_weight(layer, base.weight))
            owner, _, own = name.rpartition(".")
            setattr(backbone.get_submodule(owner), own, base)


def merged_state(backbone: nn.Module) -> dict[str, Tensor]:
    """Weights of the backbone with the adapters merged, under their original names.

    Added in float32 and then cast to the layer's dtype. The backbone itself is left as it is.
    """
    layers = {
        name: module for name, module in backbone.named_modules() if hasattr(module, "lora_A")
    }
    state: dict[str, Tensor] = {}
    for name, value in backbone.state_dict().items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        owner, base, rest = name.rpartition(".base_layer.")
        if not base:
            state[name] = value
        elif rest == "weight":
            state[f"{owner}.weight"] = _merged_weight(layers[owner], value)
        else:
            state[f"{owner}.{rest}"] = value
    return state


def _merged_weight(layer: Any, weight: Tensor) -> Tensor:
    down, up = layer.lora_A[_ADAPTER].weight.detach(), layer.lora_B[_ADAPTER].weight.detach()
    change: Tensor = (up.float() @ down.float()) * layer.scaling[_ADAPTER]
    return (weight.float() + masked(layer, change)).to(weight.dtype)


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
        """Whether the layer's output is that of its weights and one plain adapter.

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
    """Whether a bit is kept of each number of x, not d(x) and what x was multiplied by."""
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
    """The output (…, O), A d(x) of (T, R), and what the backward pass has of dropout: bits and
    nothing, or what multiplied x and d(x).

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
    """Gradients of x (or nothing), A and B by that of the output.

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
    raise NotImplementedError("layers with adapters have no second derivatives")


_OWNED.impl("adapted_linear", computed, "CompositeExplicitAutograd")
_OWNED.impl("adapted_linear_backward", gradients, "CompositeExplicitAutograd")
torch.library.register_fake("rayembed::adapted_linear", _shapes, lib=_OWNED)
torch.library.register_fake("rayembed::adapted_linear_backward", _shapes_of_gradients, lib=_OWNED)
torch.library.register_autograd(
    "rayembed::adapted_linear", _backward, setup_context=_keep, lib=_OWNED
)
torch.library.register_autograd("rayembed::adapted_linear_backward", _second, lib=_OWNED)
