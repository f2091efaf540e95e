"""List the matrices of a model that compression may change: linear layers, and each expert's
matrices.

A matrix is seen as (F, H), F outputs and H inputs, whatever way its parameter lies in memory, since
groups of 2:4 and statistics of inputs run along the inputs. E experts, N tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.models.architecture import architecture_of
from rayembed.models.experts import ExpertMlps
from rayembed.models.layers import layers_of
from rayembed.models.loading.backbones import check_not_quantised
from rayembed.models.transformer_model import TransformerModel
from rayembed_extras.compression.contract import Compressed

PARTS = ("embeddings", "attention", "mlp", "experts", "router", "norms", "head", "other")
"""Parts of a model in the statistics of a compression."""


@dataclass(frozen=True)
class Matrix:
    """A parameter with one matrix, or with one matrix for each expert."""

    name: str
    """Name of the parameter in the model's `state_dict`."""
    module: nn.Module
    attribute: str
    """Name of the parameter in its module."""
    slices: tuple[Tensor, ...]
    """(F, H) views of the parameter: one, or one for each expert."""

    @property
    def width(self) -> int:
        """Number of inputs H of the matrix."""
        return int(self.slices[0].shape[1])

    def slice_name(self, place: int) -> str:
        """Name of one expert's matrix, for messages."""
        return f"{self.name}, expert {place}" if len(self.slices) > 1 else self.name


def matrices_of(model: TransformerModel, skip: Sequence[str] | None) -> list[Matrix]:
    """List the matrices to compress, in the order of the model's parameters.

    Args:
        skip: patterns of names of parameters that are left alone beside the architecture's routers;
            None: what is outside of the transformers' layers.

    Raises:
        ConfigError: a quantised model, a pattern that no parameter has, a matrix inside a layer
            that is neither linear nor an expert's and not left alone, or nothing to compress.
    """
    check_not_quantised(model.parts)
    found = {
        matrix.name: matrix
        for name, module in model.named_modules()
        for matrix in _in_module(name, module)
    }
    inside = _names_inside(model)
    patterns = [*architecture_of(model.config).left_alone, *(skip or ())]
    _check_known(model, found, inside, patterns)
    _check_patterns(model, skip or ())
    chosen = [
        matrix
        for name, matrix in found.items()
        if (skip is not None or name in inside) and not matches(name, patterns)
    ]
    if not chosen:
        raise ConfigError(
            f"skip = {list(skip or ())} leaves no matrix to compress; the model has "
            f"{', '.join(list(found)[:5])} and others"
        )
    return chosen


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def statistics_of(
    model: TransformerModel, chosen: Sequence[Matrix], *, pruned: bool = False
) -> Compressed:
    """Count the weights of each part of the model, and the weights in the compressed
    matrices.

    Args:
        pruned: whether they have zeros now.
    """
    names = {matrix.name for matrix in chosen}
    parts: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        part = part_of(model, name)
        whole, changed = parts.get(part, (0, 0))
        size = parameter.numel()
        parts[part] = (whole + size, changed + size * (name in names))
    by_part = {part: parts[part] for part in PARTS if part in parts}
    return Compressed(by_part, tuple(matrix.name for matrix in chosen) if pruned else ())


def statistics_of_cut(before: Compressed, model: TransformerModel) -> Compressed:
    """Count the weights of each part of the model, and the weights that were removed.

    Args:
        before: statistics of the whole model.
    """
    left = statistics_of(model, ()).by_part
    return Compressed(
        {
            part: (whole, whole - left.get(part, (0, 0))[0])
            for part, (whole, _) in before.by_part.items()
        }
    )


def part_of(model: TransformerModel, name: str) -> str:
    """Classify a parameter: embeddings, norms, router, experts, head, attention, mlp or other."""
    path = name.split(".")[:-1]
    modules = [model.get_submodule(".".join(path[: end + 1])) for end in range(len(path))]
    own = modules[-1] if modules else model
    questions = {
        "embeddings": isinstance(own, nn.Embedding),
        "norms": "norm" in type(own).__name__.lower(),
        "router": matches(name, ("*.router.*", "*.gate.*", "*_expert_gate.*")),
        "experts": any(word.startswith("experts") for word in path),
        "head": bool(path) and path[0] not in model.parts,
        "attention": any("attn" in word or "attention" in word for word in path),
        "mlp": any(isinstance(module, nn.ModuleList) for module in modules),
    }
    return next((part for part, yes in questions.items() if yes), "other")


def inputs_of(
    module: nn.Module, given: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the inputs (N, H) of each matrix in one call of a module, as (attribute, slice,
    inputs).

    Of experts the rows are those of the tokens that were routed to each.

    Args:
        given, named: arguments of the module's call.
    """
    if isinstance(module, ExpertMlps):
        yield from _inputs_of_own(module, *given, **named)
    elif _is_fused(module):
        yield from _inputs_of_fused(module, *given, **named)
    else:
        rows: Tensor = given[0] if given else next(iter(named.values()))
        yield "weight", 0, rows.reshape(-1, rows.shape[-1])


def _in_module(name: str, module: nn.Module) -> Iterator[Matrix]:
    if isinstance(module, nn.Linear):
        yield Matrix(f"{name}.weight", module, "weight", (module.weight.data,))
    elif type(module).__name__ == "Conv1D" and module.weight.ndim == 2:  # GPT-2's linear layer
        weight: Any = module.weight
        yield Matrix(f"{name}.weight", module, "weight", (weight.data.T,))
    elif isinstance(module, ExpertMlps):
        first = module.w1.data.view(module.num_experts, -1, module.w1.shape[1])
        second = module.w2.data.view(module.num_experts, -1, module.w2.shape[1])
        yield Matrix(f"{name}.w1", module, "w1", first.unbind())
        yield Matrix(f"{name}.w2", module, "w2", second.transpose(1, 2).unbind())
    elif _is_fused(module):
        for attribute in _fused_attributes(module):
            whole = getattr(module, attribute).data
            if getattr(module, "is_transposed", False):
                whole = whole.transpose(1, 2)
            yield Matrix(f"{name}.{attribute}", module, attribute, whole.unbind())


def _is_fused(module: nn.Module) -> bool:
    """Whether the module stores the matrices of all experts as (E, ·, ·) parameters, as
    transformers does.
    """
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.ndim == 3 and bool(_fused_attributes(module)[1:])


def _fused_attributes(module: nn.Module) -> list[str]:
    names = ("gate_up_proj", "up_proj", "down_proj")
    return [name for name in names if isinstance(getattr(module, name, None), nn.Parameter)]


def _inputs_of_own(
    module: ExpertMlps, rows: Tensor, counts: Tensor
) -> Iterator[tuple[str, int, Tensor]]:
    (first,) = (one for one in _in_module("", module) if one.attribute == "w1")
    biases = None if module.b1 is None else module.b1.view(module.num_experts, -1)
    for expert, own in enumerate(torch.split(rows, counts.tolist())):
        yield "w1", expert, own
        bias = None if biases is None else biases[expert]
        yield "w2", expert, functional.gelu(functional.linear(own, first.slices[expert], bias))


def _inputs_of_fused(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, *_: Any, **__: Any
) -> Iterator[tuple[str, int, Tensor]]:
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    chosen = top_k_index.reshape(len(tokens), -1)
    first, _second = _in_module("", module)
    biases = getattr(module, f"{first.attribute}_bias", None)
    for expert in range(len(first.slices)):
        rows = tokens[(chosen == expert).any(dim=1)]
        yield first.attribute, expert, rows
        bias = None if biases is None else biases[expert]
        made = functional.linear(rows, first.slices[expert], bias)
        gated = first.attribute == "gate_up_proj"
        yield "down_proj", expert, module._apply_gate(made) if gated else module.act_fn(made)


def _names_inside(model: TransformerModel) -> set[str]:
    """Names of the parameters that are within the transformers' layers."""
    inside = {
        id(parameter)
        for layer in layers_of(model.parts.values())
        for parameter in layer.parameters()
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


def _check_known(
    model: TransformerModel,
    found: Mapping[str, Matrix],
    inside: set[str],
    patterns: Sequence[str],
) -> None:
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    unknown = [
        name
        for name, parameter in model.named_parameters()
        if name in inside
        and parameter.ndim > 1
        and name not in found
        and id(parameter) not in embeddings
        and not matches(name, patterns)
    ]
    if unknown:
        raise ConfigError(
            f"the model has {len(unknown)} matrices that are neither linear layers nor experts, "
            f"such as {unknown[0]!r}, so rayembed does not know how they are multiplied; exclude "
            "these matrices by patterns in skip"
        )


def _check_patterns(model: TransformerModel, skip: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"skip has the pattern {pattern!r}, which matches no parameter of the model; "
                f"{nearest(pattern, names[:40])}"
            )
