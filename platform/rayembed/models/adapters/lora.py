"""Low-rank adapters: add them to a backbone, and merge them for export or use."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from rayembed.config.backbone import LoraConfig
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
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

    from rayembed.models.adapters.adapted_linear import AdaptedLinear

    check_targets(config, linear_layers(backbone), setting=setting)
    pooled = any(
        name.startswith("pooler.") and name.rpartition(".")[2] in config.target_modules
        for name, _ in backbone.named_modules()
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


def linear_layers(backbone: nn.Module) -> dict[str, list[nn.Linear]]:
    """Group the linear layers that may get adapters by the last part of their names."""
    layers: dict[str, list[nn.Linear]] = {}
    for name, module in backbone.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("pooler."):
            layers.setdefault(name.rpartition(".")[2], []).append(module)
    return layers


def check_targets(config: LoraConfig, layers: Collection[str], *, setting: str) -> None:
    """Check that each name in `target_modules` is a linear layer's.

    Raises:
        ConfigError: one is not; lists the names that are.
    """
    for target in config.target_modules:
        if target not in layers:
            close = nearest(target, layers)
            hint = f" ({close})" if close.startswith("did") else ""
            raise ConfigError(
                f"{setting}.target_modules names {target!r}, but the model has no linear layer of "
                f"that name{hint}; its linear layers: {', '.join(sorted(layers))}. Name some of "
                f"them: {setting}.target_modules=[…]"
            )


@torch.no_grad()
def merge_lora(backbone: nn.Module) -> None:
    """Merge adapters into their layers in place, when training is over.

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
    """Return the backbone's weights with the adapters merged into them, under their
    original names.

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
