"""Count model parameters and activation bytes, cached on this machine because counting imports
torch and transformers.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rayembed.assets.cache import cache_folder, filled
from rayembed.config.document import fingerprint
from rayembed.config.model import ModelConfig
from rayembed.config.settings import changed
from rayembed.models.architecture import architecture_of
from rayembed.models.layers import recompute_layers
from rayembed.models.loading.backbones import torch_dtype
from rayembed.models.loading.build import choose_trained, shapes_of
from rayembed_extras.estimates.requirements import (
    Activations,
    ModelSize,
    empty_part,
    known_settings,
    model_size,
)

_FILE = "counted.json"
_CODE = 3
"""Version of the counting code; raise it when the same model has other counts."""


def remembered_size(model: ModelConfig) -> ModelSize | None:
    """Count parameters as `model_size` does; known settings and shapes are read from this machine's
    cache. A dry run makes no cache folder.

    Raises:
        ConfigError: as `model_size`; nothing is kept then.
    """
    values = _remembered(model, "size", model_size)
    return None if values is None else ModelSize(**values)


def remembered_activations(model: ModelConfig) -> Activations | None:
    """Count activation bytes for each token as `activations` does, cached like parameter
    counts.

    Raises:
        ConfigError: as `model_size`; nothing is kept then.
    """
    values = _remembered(model, "activations", activations)
    return None if values is None else Activations(**values)


def _remembered(
    model: ModelConfig, what: str, count: Callable[[ModelConfig], Any]
) -> dict[str, Any] | None:
    """Read counts from the cache; if they are missing, count and cache them."""
    shapes = {name: known_settings(at, f"model.{name}.path") for name, at in model.parts.items()}
    if None in shapes.values():
        return None
    if not cache_folder().is_dir():
        found = count(model)
        return None if found is None else asdict(found)
    versions = [version(name) for name in ("rayembed", "transformers", "torch")]
    built = [_CODE, what, *versions, model.model_dump(mode="json"), shapes]

    def fill(folder: Path) -> None:
        found = count(model)
        (folder / _FILE).write_text(json.dumps(None if found is None else asdict(found)))

    folder = filled(cache_folder() / "sizes" / fingerprint(built), fill)
    values: dict[str, Any] | None = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return values


@contextmanager
def kernels_on_meta() -> Iterator[None]:
    """Context manager under which the meta device allocates what a GPU's attention and dropout
    kernels would, in all threads.

    On the meta device torch makes the scores of all pairs of tokens, and dropout's noise as a
    tensor in the inputs' type. A GPU's attention keeps its inputs and output and a number a query,
    its dropout a byte a number. Attention is one operation, that of torch's flash kernel, and one
    in the backward pass; it takes any number type here, and a mask costs nothing.
    """

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, 0.0, False)[0]
        return out

    before = functional.scaled_dot_product_attention, functional.dropout
    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    functional.dropout = _dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = before


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _Answered(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Torch mode for the meta device that answers a forward pass's questions about values as if all
    tokens were text.
    """

    def __init__(self, only_text: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only_text = only_text

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._only_text
        return func(*args, **(kwargs or {}))


class MetaModel(torch.nn.Module):
    """The model to train without storage (meta device): pretrained parts with adapters, and
    pooling.

    What stands between parts is left out (projections of context, a contextual token's place).
    """

    def __init__(self, config: ModelConfig, parts: Mapping[str, Any]) -> None:
        super().__init__()
        with torch.device("meta"):
            choose_trained(config, parts)
            head = architecture_of(config).build_head(config, shapes_of(parts))
        self.parts = torch.nn.ModuleDict(parts)
        self.pooling = head if hasattr(config, "pooling") else None
        for part in parts.values():
            if hasattr(part.config, "use_cache"):
                part.config.use_cache = False
            if isinstance(pooler := getattr(part, "pooler", None), torch.nn.Module):
                pooler.requires_grad_(False)  # no embedding uses it
        self.to(torch_dtype(config.backbone.dtype)).train()

    @property
    def num_layers(self) -> int:
        """Number of layers of the backbone."""
        backbone: Any = self.parts["backbone"]
        return int(backbone.config.num_hidden_layers)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run all parts and the pooling; return the sum of their outputs, which depends on all of
        them.
        """
        mask = batch["attention_mask"]
        found = []
        for name, part in self.parts.items():
            states = part(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
            if name == "backbone" and self.pooling is not None:
                states = self.pooling(states, mask, batch["pool_mask"])
            found.append(states.sum())
        return torch.stack(found).sum()

    def recompute(self) -> None:
        """Switch on recomputing of layers in the backward pass."""
        recompute_layers(self.parts.values(), None)


def model_on_meta(config: ModelConfig) -> MetaModel | None:
    """Build the model to train on the meta device; None if only the hub has the config.json of a
    part.

    Raises:
        ConfigError: as `requirements.model_size`.
    """
    parts = {name: empty_part(config, name, at) for name, at in config.parts.items()}
    return None if None in parts.values() else MetaModel(config, parts)


def batch_on_meta(texts: int, tokens: int) -> dict[str, Tensor]:
    """Make a collated micro-batch of texts of equal length on the meta device."""
    names = ("input_ids", "attention_mask", "pool_mask")
    return {n: torch.empty(texts, tokens, dtype=torch.int64, device="meta") for n in names}


def kept_bytes(
    forward: Callable[[], Any], parameters: Iterable[Tensor], *, padded: bool = True
) -> int:
    """Count the bytes that a forward pass on the meta device keeps for its backward pass.

    Each storage counts once and parameters do not. What is recomputed is not kept.

    Args:
        padded: whether attention has a mask, for which keys and values are copied to all heads.
    """
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with kernels_on_meta(), _Answered(not padded), saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


_TEXTS, _TOKENS = 16, 32  # no more than any family has learnt positions for


def activations(config: ModelConfig, *, padded: bool = True) -> Activations | None:
    """Count the activation bytes of a token in training; None if only the hub has the config.json
    of a part.

    None also for a part that is no class of transformers: such packs tokens, and chooses experts,
    by values that nothing has here.

    Layers are all alike, so that a model of one and one of two tell of any number.

    Args:
        padded: whether attention has a mask, as in micro-batches with padding.

    Raises:
        ConfigError: as `requirements.model_size`.
    """
    from transformers import PreTrainedModel

    whole = model_on_meta(config)
    if whole is None or not all(isinstance(p, PreTrainedModel) for p in whole.parts.values()):
        return None
    (plain, recomputing), more = _of_layers(config, 1, padded), whole.num_layers - 1
    if not more:
        return Activations(plain, recomputing, plain)
    second = _of_layers(config, 2, padded)
    return Activations(
        plain + more * (second[0] - plain),
        recomputing + more * (second[1] - recomputing),
        second[0] - plain,
    )


def _of_layers(config: ModelConfig, number: int, padded: bool) -> tuple[float, float]:
    """Count activation bytes of a token for a backbone with `number` layers, without and with
    recomputing.
    """
    backbone = changed(config.backbone, num_layers=number)
    model = model_on_meta(changed(config, backbone=backbone))
    assert model is not None, "its shape is known"

    def kept(texts: int) -> int:
        batch = batch_on_meta(texts, _TOKENS)
        return kept_bytes(lambda: model(batch), model.parameters(), padded=padded)

    def of_token() -> float:
        """Bytes that each further token adds, without the bytes that a pass keeps only once."""
        return (kept(2 * _TEXTS) - kept(_TEXTS)) / (_TEXTS * _TOKENS)

    plain = of_token()
    model.recompute()
    return plain, of_token()
