"""Merge models of one architecture by arithmetic on their weights.

All is computed in float32, whatever the weights are saved in.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rayembed.assets.resolver import resolve_model
from rayembed.display.progress import doing
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.load import load_model, saved_dtype
from rayembed.models.loading.saved_prompts import saved_instructions
from rayembed.models.saving.export import check_target

MERGE_FILE = "merge.json"
"""File of a merged model's folder: method, models and shares, and scores where it was chosen."""

Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare"]
_OF_CHANGES: tuple[Method, ...] = ("ties", "dare")
"""Methods that keep a part of each model's changes."""

Weights = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

DENSITY = 0.2
"""Share of a model's changes that `ties` and `dare` keep, as in the experiments with TIES."""

_PARALLEL = 1e-4
"""Angle in radians below which two directions are one, so that nothing is divided by its sine."""


def merge_models(
    references: Sequence[str],
    output: Path,
    *,
    method: Method = "linear",
    shares: Sequence[float] | None = None,
    density: float | None = None,
) -> None:
    """Merge models and save the result in `output`, with a record of its inputs.

    Its settings, tokenizer and prompts are those of the last model, for a base that is merged with
    its fine-tuned model stands first. One model is in memory at a time, beside the sum, both in
    float32; for `dare` the base besides, and for `ties` up to ten times a model.

    Args:
        references: asset references of models, in the order of the shares.
        method, shares, density: see `merge`.

    Raises:
        ArtifactError: models that do not fit each other, or `output` holds something else.
        AssetError: a reference leads nowhere.
        ConfigError: shares that the method cannot take, or a density of a method that keeps all.
    """
    density = check_density(method, density)
    shares = check_shares(method, len(references), shares)
    check_target(output)
    folders = [resolve_model(reference) for reference in references]
    words: dict[str, int] = {}

    def read(reference: str, folder: Path) -> dict[str, Tensor]:
        with doing(f"reading {reference}"):
            model = load_model(folder, dtype="float32")
        own = model.tokenizer.pretrained.get_vocab()
        if words and own != words:
            raise ArtifactError(
                f"{reference} cannot be merged with {references[0]}: their tokenizers have "
                "different vocabularies, so the same row of their embeddings means different tokens"
            )
        words.update(own)
        return model.state_dict()

    # No model has a name here, under which it would outlive its turn.
    weights = (read(*each) for each in zip(references, folders, strict=True))
    merged = merge(method, weights, shares, density)
    last = load_model(folders[-1], dtype=saved_dtype(folders[-1]))
    last.load_state_dict(merged)
    last.save(output, instructions=saved_instructions(folders[-1], last.config))
    made_of: dict[str, Any] = {
        "method": method,
        "models": list(references),
        "shares": list(shares),
    }
    if method in _OF_CHANGES:
        made_of["density"] = density
    (output / MERGE_FILE).write_text(json.dumps(made_of, indent=2) + "\n")


def merge(
    method: Method, models: Iterable[Weights], shares: Sequence[float], density: float = DENSITY
) -> dict[str, Tensor]:
    """Compute the merged weights in float32; tensors that are not floating-point come from the
    first model.

    - `linear`: Σ wᵢ θᵢ with shares that sum to 1; with equal ones a soup (arXiv 2203.05482), of a
      model before and after its fine-tuning WiSE-FT (arXiv 2109.01903).
    - `slerp`: each tensor goes the share of the way from the first model to the second along the
      arc between their directions; its norm goes in a straight line.
    - `task_arithmetic`: θ₀ + Σ wᵢ (θᵢ - θ₀), the first model being the base (arXiv 2212.04089).
    - `ties`: of each model's changes τᵢ = θᵢ - θ₀ those of the largest magnitude are kept, a share
      of `density` over all weights, the others become 0. Of each weight the sign of Σ wᵢ τᵢ is
      elected, and the models with that sign are averaged: θ₀ + (Σ wᵢ) Σ₊ wᵢ τᵢ / Σ₊ wᵢ (arXiv
      2306.01708, algorithm 1).
    - `dare`: θ₀ + Σ wᵢ mᵢ τᵢ / density, where the mask mᵢ keeps a random share of `density` of the
      changes (arXiv 2311.03099), which a weight's name and the model's place decide.

    Args:
        models: weights by name, one model after the other; each is read once.
        shares: of each model for `linear`; of the second alone for `slerp`; of each but the first
            for the others. See `check_shares`.
        density: share of the changes that `ties` and `dare` keep.

    Raises:
        ArtifactError: a model has other weights than the first.
    """
    if method in _OF_CHANGES:
        return _merge_changes(method, iter(models), shares, density)
    first, *rest = _factors(method, shares)
    merged: dict[str, Tensor] = {}
    shapes: Shapes = {}
    others = enumerate(rest, start=2)
    # Nothing here may hold a model while the next one is read; `enumerate` would.
    for model in models:
        if shapes:
            number, share = next(others)
            _check_alike(shapes, _shapes(model), number)
            _add(merged, model, method, share)
        else:
            shapes = _shapes(model)
            scale = 1.0 if method == "slerp" else first
            merged = {
                name: scale * tensor.float() if tensor.is_floating_point() else tensor.clone()
                for name, tensor in model.items()
            }
        del model
    return merged


def _merge_changes(
    method: Method, models: Iterator[Weights], shares: Sequence[float], density: float
) -> dict[str, Tensor]:
    """Add the kept part of each model's changes to the first model; see `merge`."""
    base = {
        name: tensor.float().clone() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in next(models).items()
    }
    shapes = _shapes(base)
    learnt = [name for name, tensor in base.items() if tensor.is_floating_point()]
    # Of each weight the sums over positive and over negative changes, and the shares of both.
    sums = {name: torch.zeros(4, *base[name].shape) for name in learnt} if method == "ties" else {}
    merged = {name: base[name].clone() for name in learnt}
    for number, share in enumerate(shares, start=2):
        model = next(models)
        _check_alike(shapes, _shapes(model), number)
        changes = {name: model[name].float() - base[name] for name in learnt}
        del model
        if method == "dare":
            for name, change in changes.items():
                merged[name].add_(_drop(change, density, f"{number} {name}"), alpha=share)
            continue
        least = _magnitude(changes, density)
        for name, change in changes.items():
            kept = torch.where(change.abs() >= least, change, 0.0)
            sums[name][0] += share * kept.clamp(min=0)
            sums[name][1] += share * kept.clamp(max=0)
            sums[name][2] += share * (kept > 0)
            sums[name][3] += share * (kept < 0)
        del changes, change, kept  # before the next model is read
    for name, (positive, negative, of_positive, of_negative) in sums.items():
        up = positive + negative >= 0
        total = torch.where(up, positive, negative)
        weight = torch.where(up, of_positive, of_negative)
        merged[name] += sum(shares) * torch.where(weight > 0, total / weight, 0.0)
    return {name: merged.get(name, tensor) for name, tensor in base.items()}


def _magnitude(changes: Weights, density: float) -> float:
    """Smallest magnitude among the share `density` of the largest changes of all weights."""
    every = torch.cat([change.abs().flatten() for change in changes.values()])
    kept = max(1, round(density * len(every)))
    return float(every.kthvalue(len(every) - kept + 1).values)


def _drop(change: Tensor, density: float, name: str) -> Tensor:
    """Set a random part of the changes to 0 and scale up the others; the same part for a name."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    kept = torch.rand(change.shape, generator=draw) < density
    return torch.where(kept, change / density, 0.0)


def check_density(method: Method, density: float | None) -> float:
    """Check the share of changes that a method keeps, and return it; the default is 0.2.

    Raises:
        ConfigError: it is not above 0 and at most 1, or the method keeps all changes.
    """
    if density is None:
        return DENSITY
    if method not in _OF_CHANGES:
        raise ConfigError(
            f"density={density:g} has no effect, because the merge method {method!r} keeps all "
            f"changes; leave it out, or use the method {' or '.join(_OF_CHANGES)}"
        )
    if not 0 < density <= 1:
        raise ConfigError(f"density must be above 0 and at most 1, but is {density:g}")
    return density


def _add(merged: dict[str, Tensor], model: Weights, method: Method, share: float) -> None:
    """Add one more model's weights, multiplied by its share, to the merged weights in place."""
    for name, tensor in model.items():
        if not tensor.is_floating_point():
            continue
        if method == "slerp":
            merged[name] = _slerp(merged[name], tensor.float(), share)
        else:
            merged[name].add_(tensor.float(), alpha=share)


def check_shares(method: Method, number: int, shares: Sequence[float] | None) -> tuple[float, ...]:
    """Check the weights (shares) with which `number` models are merged, and return them; the
    default is equal shares.

    Raises:
        ConfigError: too few models, another number of shares, or shares that the method cannot
            take.
    """
    wanted = {"linear": number, "slerp": 1}.get(method, number - 1)
    if number < 2 or (method == "slerp" and number != 2):
        needs = "exactly two models" if method == "slerp" else "at least two models"
        raise ConfigError(f"{method} merges {needs}, but {number} were given")
    if shares is None:
        return (0.5,) if method == "slerp" else (1 / wanted,) * wanted
    if len(shares) != wanted:
        of = {
            "linear": "one of each model",
            "slerp": "that of the second model",
        }.get(method, "one of each model after the base, which comes first")
        raise ConfigError(
            f"{method} of {number} models needs {wanted} shares ({of}), but {len(shares)} were "
            "given"
        )
    if method == "linear" and abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(f"the shares of a linear merge must sum to 1, but sum to {sum(shares):g}")
    if method == "ties" and min(shares) <= 0:
        raise ConfigError(
            f"the shares of a TIES merge must be above 0, but one is {min(shares):g}; to subtract "
            "a model, use the method task_arithmetic"
        )
    if method == "slerp" and not 0 <= shares[0] <= 1:
        raise ConfigError(f"the share of a slerp must be between 0 and 1, but is {shares[0]:g}")
    return tuple(shares)


def _factors(method: Method, shares: Sequence[float]) -> tuple[float, ...]:
    """Convert the shares of a merge method to a factor for each model's weights."""
    of: dict[Method, Callable[[], tuple[float, ...]]] = {
        "linear": lambda: tuple(shares),
        "slerp": lambda: (1 - shares[0], shares[0]),
        "task_arithmetic": lambda: (1 - sum(shares), *shares),
    }
    return of[method]()


def _shapes(model: Weights) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.items()}


def _check_alike(base: Shapes, model: Shapes, number: int) -> None:
    shapes = (base, model)
    apart = sorted(name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items()))
    if apart:
        name = apart[0]
        there = [str(shape.get(name, "absent")) for shape in shapes]
        raise ArtifactError(
            f"model {number} cannot be merged with the first one: {len(set(apart))} of their "
            f"weights differ in name or shape, such as {name} ({there[0]} and {there[1]}); merge "
            "models of one architecture, fine-tuned from the same start"
        )


def _slerp(one: Tensor, other: Tensor, share: float) -> Tensor:
    norms = one.norm(), other.norm()
    if not all(norms):
        return torch.lerp(one, other, share)
    cosine = ((one / norms[0]) * (other / norms[1])).sum().clamp(-1, 1)
    angle = torch.arccos(cosine)
    # Opposite directions have no arc of their own either.
    if angle < _PARALLEL or torch.pi - angle < _PARALLEL:
        return torch.lerp(one, other, share)
    direction = (
        torch.sin((1 - share) * angle) * one / norms[0]
        + torch.sin(share * angle) * other / norms[1]
    ) / torch.sin(angle)
    found: Tensor = direction * torch.lerp(norms[0], norms[1], share)
    return found
