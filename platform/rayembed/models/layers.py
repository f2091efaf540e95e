"""Handling of transformer layers: compile them, recompute their activations, remove some of
them.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

_PRODUCTS = ("rayembed", "torch_attn")
"""Namespaces of the operations that count as products beside torch's own: layers with adapters, and
attention over packed texts."""

_PACKETS = {*flop_registry, torch.ops.aten._grouped_mm}
"""Products by their names in torch; its table of products lacks that of experts."""


def compile_layers(parts: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile the layers of these models in place; names and weights stay unchanged.

    Element-wise work between products is fused: norms, activations, rotary positions and LoRA's
    additions are 40 % of a 7B model's pass (16,384 tokens on an H100, by a roofline). Attention of
    packed texts stays a kernel of its own within each layer's graph.

    Layers of one kind share their graphs, in which the number of tokens is open: one for passes
    with and one for passes without gradient, in training and in use. Dropout draws the numbers that
    it draws uncompiled, so that GradCache's second pass repeats the first one's.

    Args:
        backend: of torch.compile; tests take one that needs no compiler.
    """
    options: dict[str, Any] = {"fallback_random": True} if backend == "inductor" else {}
    for layer in layers_of(parts):
        layer.compile(dynamic=True, backend=backend, options=options or None)


def recompute_layers(
    parts: Iterable[nn.Module], number: int | None, between_products: int = 0
) -> None:
    """Make the first `number` layers recompute their activations in the backward pass, in training
    only.

    These are the first ones, whose turn in the backward pass is last: by then the graphs of the
    others are gone. The layers after them keep what matrix products and attention put out, and
    recompute what lies between: norms, activations, rotary positions.

    Args:
        number: layers of all parts; None: all.
        between_products: how many of the next layers recompute all but products.
    """
    again = partial(checkpoint, use_reentrant=False)
    for place, layer in enumerate(recomputable_layers(parts)):
        # As `gradient_checkpointing_enable` of transformers does, which knows no single layers and
        # makes the first one's input require a gradient.
        layer._gradient_checkpointing_func = again
        layer.gradient_checkpointing = number is None or place < number
        vars(layer).pop("forward", None)
        if number is not None and number <= place < number + between_products:
            # Within the layer's call, so that a compiled layer is cut there by its compiler.
            layer.forward = partial(_keep_products, layer)


def keeps_products(parts: Iterable[nn.Module]) -> bool:
    """Whether the layers can recompute everything except matrix products, which dropout between the
    products prevents.

    Not beside dropout that is drawn between them: a product that is kept draws its own numbers
    once, and what is computed again would draw others.
    """
    return not any(
        _drops(holder)
        for part in parts
        for name, module in part.named_modules()
        if "lora_dropout" not in name
        for holder in (module, getattr(module, "config", None))
    )


def _drops(holder: Any) -> bool:
    """Whether a module, or a model's configuration, has a dropout probability above 0.

    Families differ in its name, and many pass it to a function of torch.
    """
    if isinstance(holder, nn.modules.dropout._DropoutNd):
        return holder.p > 0
    return any(
        "drop" in name and isinstance(value, float) and value > 0
        for name, value in getattr(holder, "__dict__", {}).items()
    )


def _keep_products(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the layer's forward pass so that only matrix products are stored, and the rest is
    recomputed in the backward pass.
    """
    forward = partial(type(layer).forward, layer)
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operation._overloadpacket in _PACKETS or operation.namespace in _PRODUCTS
    if operation is torch.ops.aten.mm.default:
        # Torch changes the shape of a vector's product in place, which what is kept must not be.
        # Comparing a number of rows that a graph leaves open would settle it there.
        rows = args[0].shape[0]
        product = not (isinstance(rows, int) and rows == 1)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _policy)


def recomputable_layers(parts: Iterable[nn.Module]) -> list[Any]:
    """Return the layers that support recomputation, in execution order."""
    return [layer for layer in layers_of(parts) if hasattr(layer, "gradient_checkpointing")]


def layers_of(parts: Iterable[nn.Module]) -> list[Any]:
    """Return all layers of these models, in execution order."""
    return list(chain.from_iterable(map(_layers, parts)))


def replace_layers(part: nn.Module, kept: Sequence[int]) -> None:
    """Keep only the layers at the given indices (from 0) of a transformer, in place."""
    layers = _layers(part)
    name = next(name for name, module in part.named_modules() if module is layers)
    owner, _, own = name.rpartition(".")
    setattr(part.get_submodule(owner), own, nn.ModuleList(layers[layer] for layer in kept))


def keep_rows(words: torch.nn.Embedding, new: Mapping[int, int]) -> None:
    """Keep only the embedding rows whose token id has a new id, in place and in the same order."""
    kept = torch.tensor(sorted(new), device=words.weight.device)
    words.weight = torch.nn.Parameter(words.weight.detach()[kept].clone())
    words.num_embeddings = len(kept)
    words.padding_idx = None if words.padding_idx is None else new.get(words.padding_idx)


def _layers(part: nn.Module) -> nn.ModuleList:
    """Return the layers of a transformer: its longest list of modules, the outermost one if several
    are equally long.
    """
    lists = [module for module in part.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())
