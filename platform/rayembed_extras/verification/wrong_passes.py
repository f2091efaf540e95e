"""Run a loaded model with one deliberate mistake: wrong pooling, mask, head, length or
number type.

The model is as before after each of them. B texts, T tokens, H hidden size, D embedding width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rayembed.models.contract import Tokens, to_device
from rayembed.models.pooling import ProjectedPooling
from rayembed.models.transformer_model import TransformerModel

Pooled = Mapping[str, np.ndarray]
"""Pooling → unit vectors (n, D)."""

_LEVELS = 255
"""Steps of an 8-bit range."""


def embed(model: TransformerModel, tokens: Sequence[Tokens], context: Tensor | None = None) -> Any:
    """Compute vectors (n, D) float32 of tokenised texts, in one padded pass."""
    batch = to_device(model.tokenizer.collate(list(tokens)), model.device)
    with torch.no_grad():
        output = model(batch) if context is None else model(batch, context)
    return output.embeddings.float().cpu().numpy()


def unnormalised(model: TransformerModel, tokens: Sequence[Tokens]) -> np.ndarray | None:
    """Compute vectors (n, D) before their last normalisation; None if torch does not normalise
    them.
    """
    with _LastNormalised() as seen:
        made = embed(model, tokens)
    if seen.rows is None or tuple(seen.rows.shape) != made.shape:
        return None
    return unit_or_not(seen.rows)


class _LastNormalised(TorchFunctionMode):
    """Torch mode that keeps the tensor that this thread normalised last."""

    rows: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.normalize:
            self.rows = args[0]
        return func(*args, **(kwargs or {}))


def unit_or_not(rows: Tensor) -> np.ndarray:
    """Convert a tensor to a float32 array on the CPU."""
    return rows.detach().float().cpu().numpy()


def poolings(model: TransformerModel, tokens: Sequence[Tokens]) -> Pooled:
    """Compute unit vectors with each pooling (`mean`, `pool`: mean over the tokens that the model
    pools, `cls`, `last`), followed by the model's own later layers.

    Empty for models without a backbone of torch.
    """
    backbone: Any = model.parts.get("backbone")
    if backbone is None:
        return {}
    made: dict[str, list[np.ndarray]] = {"mean": [], "pool": [], "cls": [], "last": []}
    behind = _behind_pooling(model)
    for one in tokens:
        states = _states(model, backbone, one)
        pool = torch.from_numpy(np.asarray(one.get("pool_mask", np.ones(len(states), bool))))
        pool = pool.to(states.device)
        chosen = {
            "mean": states.mean(0),
            "pool": states[pool].mean(0),
            "cls": states[0],
            "last": states[-1],
        }
        with torch.no_grad():
            for name, pooled in chosen.items():
                vector = behind(pooled.unsqueeze(0)).float()[:, : model.dimensions[0]]
                made[name].append(functional.normalize(vector, dim=-1)[0].cpu().numpy())
    return {name: np.stack(rows) for name, rows in made.items()}


def _states(model: TransformerModel, backbone: Any, tokens: Tokens) -> Tensor:
    """(T, H) float32 backbone states of one text's tokens, without states of vectors inserted
    before them.
    """
    seen: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        seen.append(output.last_hidden_state.detach())

    hook = backbone.register_forward_hook(keep)
    try:
        embed(model, [tokens])
    finally:
        hook.remove()
    return seen[-1].float().flatten(0, -2)[-len(tokens["input_ids"]) :]


def _behind_pooling(model: TransformerModel) -> Callable[[Tensor], Tensor]:
    """Return the model's own layers between pooling and normalisation."""
    pooling = getattr(model, "pooling", None)
    if isinstance(pooling, ProjectedPooling):
        return nn.Sequential(*pooling.projections)
    layer = getattr(getattr(model, "layers", None), "embedding", None)
    return layer if callable(layer) else nn.Identity()


def without_projections(model: TransformerModel, tokens: Sequence[Tokens]) -> np.ndarray | None:
    """Compute unit vectors (n, H) without the Dense layers after the pooling; None if the model has
    none.
    """
    pooling: Any = getattr(model, "pooling", None)
    if not isinstance(pooling, ProjectedPooling):
        return None
    whole = model.dimensions
    model.pooling = pooling.pooling
    model.dimensions = (int(pooling.projections[0].linear.in_features),)  # type: ignore[union-attr,arg-type]
    try:
        made: np.ndarray = embed(model, tokens)
    finally:
        model.pooling, model.dimensions = pooling, whole
    return made


def with_causal_mask(model: TransformerModel, tokens: Sequence[Tokens]) -> np.ndarray | None:
    """Compute unit vectors (n, D) with a causal mask in a decoder trained without one; None for
    other models.
    """
    if getattr(model.config, "mask", None) != "bidirectional":
        return None
    backbone: Any = model.backbone
    with ExitStack() as stack:
        stack.enter_context(_set(backbone.config, "is_causal", True))
        for module in backbone.modules():
            if hasattr(module, "is_causal"):
                stack.enter_context(_set(module, "is_causal", True))
        # Texts of one length need no mask tensor, and are then computed by the layers' flag.
        return np.concatenate([embed(model, [one]) for one in tokens])


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def in_bfloat16(model: TransformerModel, tokens: Sequence[Tokens]) -> np.ndarray:
    """Compute unit vectors (n, D) with weights and each layer's output rounded to bfloat16.

    Products are in float32, as fast on CPUs without instructions for bfloat16.
    """
    of_parts = {m for part in model.parts.values() for m in part.modules()}
    with ExitStack() as stack:
        for module in model.modules():
            # Layers of a transformer add to what they read; poolings compute in float32.
            rounds = module in of_parts or next(module.children(), None) is None
            own = list(module.parameters(recurse=False))
            if own or rounds:
                stack.enter_context(_rounded(module, own, rounds))
        made: np.ndarray = embed(model, tokens)
    return made


@contextmanager
def _rounded(module: nn.Module, own: Sequence[nn.Parameter], rounds: bool) -> Iterator[None]:
    """Context manager that rounds a module's own weights to bfloat16 while it runs, and its
    output.
    """
    exact = [parameter.data for parameter in own]

    def before(*_: Any) -> None:
        for parameter in own:
            parameter.data = _bfloat16(parameter.data)

    def after(_: Any, __: Any, output: Any) -> Any:
        restore()
        is_number = isinstance(output, Tensor) and output.is_floating_point()
        return _bfloat16(output) if rounds and is_number else output

    def restore() -> None:
        for parameter, data in zip(own, exact, strict=True):
            parameter.data = data

    hooks = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


def _bfloat16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


def in_int8(model: TransformerModel, tokens: Sequence[Tokens]) -> np.ndarray:
    """Compute unit vectors (n, D) with the weights and inputs of linear layers rounded to
    int8.

    Each output of a layer has a scale of its own, and each token, as vLLM and OpenVINO have it.
    """
    linear = [
        m for part in model.parts.values() for m in part.modules() if isinstance(m, nn.Linear)
    ]
    with ExitStack() as stack:
        for module in linear:
            stack.enter_context(_quantised(module))
        made: np.ndarray = embed(model, tokens)
    return made


@contextmanager
def _quantised(module: nn.Linear) -> Iterator[None]:
    exact = module.weight.data

    def before(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = exact.abs().amax(1, keepdim=True).clamp(min=1e-12) / (_LEVELS // 2)
        module.weight.data = (exact / scale).round() * scale
        largest = inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-12)
        step = largest / (_LEVELS // 2)
        return ((inputs[0] / step).round() * step, *inputs[1:])

    def after(*_: Any) -> None:
        module.weight.data = exact

    hooks = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    try:
        yield
    finally:
        module.weight.data = exact
        for hook in hooks:
            hook.remove()
