"""Support for training a pruned model: its zero weights stay zero, in layers and in
adapters.

Trained weights are held at zero by `training.kept_zeros`; here are the mask and the layers whose
weights are frozen beneath an adapter, as the sum of both must keep the zeros.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.contract import TrainableModel
from rayembed.models.saving.export import COMPRESSION_FILE, read_compression, write_compression

_ADAPTER = "default"
_ZEROS = "kept_zeros"
"""Name of an adapted layer's buffer, (out, in) bool: where the sum of its weights stays zero."""


def keep_zeros(model: TrainableModel, folders: Path | Mapping[str, Path], *, head: bool) -> None:
    """Record which weights of the pruned matrices are zero, and mask the model's adapters
    there.

    Args:
        model: with the start's weights and fresh adapters; on the meta device it is only checked.
        folders: as of `build.build_model`.
        head: whether its head came from the start.

    Raises:
        ConfigError: no part of the start was pruned.
        ArtifactError: the start names matrices that the model does not have, or they have no zeros.
    """
    own = dict(model.named_parameters())
    found: dict[str, nn.Parameter] = {}
    for name in _pruned(folders, head=head):
        beneath = f"{name.rpartition('.')[0]}.base_layer.weight"
        if (parameter := own.get(name, own.get(beneath))) is None:
            raise ArtifactError(
                f"the {COMPRESSION_FILE} of the start model names the pruned matrix {name!r}, "
                "which the model to train does not have; train the kind of model that was pruned, "
                "with all of its layers, or set model.keep_zeros=false"
            )
        found[name] = parameter
    if next(iter(found.values())).is_meta:
        return
    model.kept_zeros = {name: parameter.detach() == 0 for name, parameter in found.items()}
    if not any(bool(zeros.any()) for zeros in model.kept_zeros.values()):
        raise ArtifactError(
            f"the pruned matrices of the start model ({', '.join(list(found)[:3])}, …) hold no "
            "zero, so there is nothing to keep; prune it again, or set model.keep_zeros=false"
        )
    layers = dict(model.named_modules())
    for name, zeros in model.kept_zeros.items():
        if hasattr(layer := layers[name.rpartition(".")[0]], "lora_A"):
            layer.register_buffer(_ZEROS, zeros, persistent=False)
            layer.lora_variant[_ADAPTER] = MaskedLora()


def _pruned(folders: Path | Mapping[str, Path], *, head: bool) -> list[str]:
    """Return the sorted names of the pruned matrices, from the compression records of the start
    model's folders.
    """
    places = folders if isinstance(folders, Mapping) else {"backbone": folders}
    named: dict[str, list[str]] = {}
    for part, folder in places.items():
        told = read_compression(folder) or {}
        names = told.get("matrices", [])
        own = [name for name in names if name.startswith(f"{part}.")]
        of_head = [name for name in names if name.partition(".")[0] not in places]
        named[part] = own + (of_head if head and part == "backbone" else [])
    if found := sorted({name for names in named.values() for name in names}):
        return found
    seen = ", ".join(repr(str(folder)) for folder in places.values())
    raise ConfigError(
        f"model.keep_zeros: the start model {seen} was not pruned: its folder has no "
        f"{COMPRESSION_FILE} that names pruned matrices; name the folder of a pruned model in "
        "model.backbone.path, or set model.keep_zeros=false"
    )


def carry_compression(folders: Mapping[str, Path], model: TrainableModel, folder: Path) -> None:
    """Copy the start model's pruning record into an exported model's folder, and list there the
    matrices in which zeros are kept.
    """
    told = (read_compression(start) for start in folders.values())
    first = next((one for one in told if one is not None), {})
    write_compression(folder, {**first, "matrices": sorted(model.kept_zeros)})


class MaskedLora:
    """Variant of peft's LoRA that masks the update B·A, so that pruned weights stay zero.

    The masked product is formed in each pass, so that the layer computes with the very weights
    that are exported. It takes the room of the layer's own weights once more until the backward
    pass is done.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Return the output (…, out) of the frozen weights plus the masked adapter."""
        down, up = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        change = masked(module, up @ down) * module.scaling[active_adapter]
        return result + functional.linear(module.lora_dropout[active_adapter](x), change)


def masked(layer: Any, change: Tensor) -> Tensor:
    """Compute the adapter's update (out, in) of a layer's weights, set to zero where these are
    pruned.
    """
    zeros = getattr(layer, _ZEROS, None)
    return change if zeros is None else change.masked_fill(zeros, 0.0)
