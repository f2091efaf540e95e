"""Fit maps from a new model's vectors to an older model's, on vectors of the same texts.

n texts, X (n, D_new) of the new model, Y (n, D_old) of the old one, rows of unit length.

    orthogonal   argmin ‖X R − Y‖ with orthonormal rows or columns of R (Schönemann 1966)
    affine       R of `orthogonal`, and ridge regression of Y − X R on X with a bias
    low_rank     ridge regression of Y on X whose weight has rank r
    mlp          the affine map and a residual layer, x W + b + GELU(x A + a) B + c
    ranking      the affine map, trained to rank texts as Y does: with C, the rows of Y for at most
                 4,000 of them, argmin Σ KL(softmax(Y Cᵀ / τ) ‖ softmax(m(X) Cᵀ / τ)), m(x) the unit
                 vector of x W + b, τ = 0.05 (the loss of TCT-ColBERT, arXiv 2010.11386)

As in Drift-Adapter (arXiv 2509.23471), but for the penalty of `affine`, which draws W towards R and
not towards 0: with few texts it is never far behind `orthogonal`. Two others were measured and left
out: the transposed ridge regression of new documents on old ones, and a distillation of the new
model's ranking. Both agree more with that ranking, and find fewer of the judged documents.
`ranking` distils the old model's: errors count by what they change in its results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed.errors import DataError
from rayembed_extras.index_upgrades.maps import MapKind, QueryMap, unit

FEWEST = 20
"""Texts below which no map is fitted."""

_LAMBDAS = tuple(10.0 ** (step / 2) for step in range(-8, 5))
"""Penalties that cross-validation tries, relative to the mean variance of a direction."""
_RANK = 64
_HIDDEN = 256
_EPOCHS, _PATIENCE, _BATCH = 60, 6, 128
_LEARNING_RATE = 3e-4
_HELD_OUT = 0.1
"""Share of the texts by which training of the MLP and of `ranking` stops."""
_RANKED, _TEMPERATURE = 4_000, 0.05
"""Texts that `ranking` ranks, and its τ."""
_STEPS, _RANKING_BATCH, _RANKING_RATE = 600, 256, 1e-3


@dataclass(frozen=True)
class Ridge:
    """Ridge regression with a bias, whose penalty leave-one-out cross-validation has chosen."""

    weight: np.ndarray
    """(D_in, D_out) float64."""
    bias: np.ndarray
    """(D_out,) float64."""
    penalty: float
    errors: tuple[float, ...]
    """Mean squared error of the left-out rows for each penalty."""


def fit_ridge(
    inputs: np.ndarray, outputs: np.ndarray, penalties: Sequence[float] | None = None
) -> Ridge:
    """Fit a ridge regression with an unpenalised bias by leave-one-out cross-validation.

    The left-out error of row i is its error divided by 1 − hᵢᵢ of the hat matrix (Allen's PRESS).

    Args:
        penalties: to choose from; None: 13 from 10⁻⁴ to 10² of the mean variance of a direction.
    """
    x, y = inputs.astype(np.float64), outputs.astype(np.float64)
    x_mean, y_mean = x.mean(axis=0), y.mean(axis=0)
    x, y = x - x_mean, y - y_mean
    values, directions = np.linalg.eigh(x.T @ x)
    values = np.maximum(values, 0.0)
    if penalties is None:
        penalties = [step * float(values.mean() or 1.0) for step in _LAMBDAS]
    rotated = x @ directions
    target = rotated.T @ y
    errors = []
    for penalty in penalties:
        shrunk = 1 / (values + penalty)
        leverage = (rotated**2) @ shrunk + 1 / len(x)
        apart = (y - rotated @ (shrunk[:, None] * target)) / (1 - leverage)[:, None]
        errors.append(float(np.mean(apart**2)))
    penalty = penalties[int(np.argmin(errors))]
    weight = directions @ (target / (values + penalty)[:, None])
    return Ridge(weight, y_mean - x_mean @ weight, penalty, tuple(errors))


def orthogonal_weight(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """(D_new, D_old) matrix with orthonormal rows or columns, the nearest to map inputs to outputs.

    Equal to Procrustes after the narrower side is padded by zeros.
    """
    left, _, right = np.linalg.svd(
        inputs.astype(np.float64).T @ outputs.astype(np.float64), full_matrices=False
    )
    made: np.ndarray = left @ right
    return made


def low_rank_factors(inputs: np.ndarray, ridge: Ridge, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors (D_new, r) and (r, D_old) of the reduced-rank ridge regression: the full one,
    projected on the main directions of its predictions (Mukherjee and Zhu 2011).
    """
    x = inputs.astype(np.float64)
    x = x - x.mean(axis=0)
    gram = x.T @ x + ridge.penalty * np.eye(x.shape[1])
    _, main = np.linalg.eigh(ridge.weight.T @ gram @ ridge.weight)
    up = main[:, ::-1][:, :rank].T
    return ridge.weight @ up.T, up


def fit_map(kind: MapKind, new: np.ndarray, old: np.ndarray, *, seed: int = 0) -> QueryMap:
    """Fit a map on the new and the old model's vectors of the same texts.

    Raises:
        DataError: fewer than 20 texts, or another number of rows.
    """
    if len(new) != len(old) or len(new) < FEWEST:
        raise DataError(
            f"a map needs vectors of at least {FEWEST} texts by both models, but there are "
            f"{len(new)} and {len(old)}; use a larger index, or --road backfill"
        )
    facts: dict[str, object] = {"texts": len(new)}
    arrays: dict[str, np.ndarray] = {}
    match kind:
        case "identity":
            pass
        case "orthogonal":
            arrays = {"weight": orthogonal_weight(new, old)}
        case "low_rank":
            ridge = fit_ridge(new, old)
            rank = min(_RANK, new.shape[1], old.shape[1])
            down, up = low_rank_factors(new, ridge, rank)
            center = new.astype(np.float64).mean(axis=0)
            bias = old.astype(np.float64).mean(axis=0) - center @ down @ up
            arrays = {"down": down, "up": up, "bias": bias}
            facts |= {"penalty": ridge.penalty, "rank": rank}
        case _:
            arrays, facts["penalty"] = _affine(new, old)
            if kind == "mlp":
                trained, facts["epochs"] = _trained(new, old, seed)
                # Of no epoch the layer adds nothing, and the affine map of all texts is better.
                arrays = trained if facts["epochs"] else {**trained, **arrays}
            if kind == "ranking":
                trained, facts["epochs"] = _ranking(new, old, seed)
                arrays = trained if facts["epochs"] else arrays
    made = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    return QueryMap(kind, (new.shape[1], old.shape[1]), made, facts)


def _affine(new: np.ndarray, old: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
    """Weight and bias of the affine map, and its penalty."""
    turn = orthogonal_weight(new, old)
    ridge = fit_ridge(new, old - new @ turn)
    return {"weight": turn + ridge.weight, "bias": ridge.bias}, ridge.penalty


def _trained(new: np.ndarray, old: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], int]:
    """Train the residual layer on a fixed affine map by the cosine; return the arrays of the epoch
    with the best held-out one, and its number, 0 for none better than the affine map.

    The affine map knows the training part alone here, or the held-out part would favour it.
    """
    import torch
    from torch.nn.functional import cosine_similarity
    from torch.nn.functional import gelu as torch_gelu

    chance = torch.Generator().manual_seed(seed)
    x, y = torch.from_numpy(unit(new)), torch.from_numpy(unit(old))
    order = torch.randperm(len(x), generator=chance)
    held = order[: max(1, int(len(x) * _HELD_OUT))]
    train = order[len(held) :]
    start, _ = _affine(new[train.numpy()], old[train.numpy()])
    width = x.shape[1]
    inner = torch.randn(width, _HIDDEN, generator=chance) / width**0.5
    weights = {
        **{name: torch.tensor(array, dtype=torch.float32) for name, array in start.items()},
        "inner": inner,
        "inner_bias": torch.zeros(_HIDDEN),
        "outer": torch.zeros(_HIDDEN, y.shape[1]),
        "outer_bias": torch.zeros(y.shape[1]),
    }
    trained = [one for name, one in weights.items() if name not in start]
    for one in trained:
        one.requires_grad_()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        some = x[rows]
        hidden = torch_gelu(some @ weights["inner"] + weights["inner_bias"], approximate="tanh")
        made = some @ weights["weight"] + weights["bias"]
        made = made + hidden @ weights["outer"] + weights["outer_bias"]
        return 1 - cosine_similarity(made, y[rows]).mean()

    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=0.01)
    held_out: Callable[[], float] = torch.no_grad()(lambda: float(loss(held)))
    best, kept, best_epoch = held_out(), _copied(weights), 0
    for epoch in range(1, _EPOCHS + 1):
        shuffled = train[torch.randperm(len(train), generator=chance)]
        for rows in shuffled.split(_BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss(rows).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        now = held_out()
        if now < best:
            best, kept, best_epoch = now, _copied(weights), epoch
        elif epoch - best_epoch >= _PATIENCE:
            break
    return kept, best_epoch


def _ranking(new: np.ndarray, old: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], int]:
    """Train an affine map to rank texts as the old vectors do; return the arrays of the epoch with
    the best held-out ranking, and its number, 0 for none better than the affine map.
    """
    import torch
    from torch.nn.functional import kl_div, normalize

    chance = torch.Generator().manual_seed(seed)
    x, y = torch.from_numpy(unit(new)), torch.from_numpy(unit(old))
    order = torch.randperm(len(x), generator=chance)
    held = order[: max(1, int(len(x) * _HELD_OUT))]
    train = order[len(held) :]
    start, _ = _affine(new[train.numpy()], old[train.numpy()])
    weights = {
        name: torch.tensor(array, dtype=torch.float32, requires_grad=True)
        for name, array in start.items()
    }
    ranked = y[torch.randperm(len(y), generator=chance)[:_RANKED]].T / _TEMPERATURE

    def loss(rows: torch.Tensor) -> torch.Tensor:
        made = normalize(x[rows] @ weights["weight"] + weights["bias"], dim=1)
        wanted = (y[rows] @ ranked).softmax(dim=1)
        return kl_div((made @ ranked).log_softmax(dim=1), wanted, reduction="batchmean")

    optimizer = torch.optim.AdamW(weights.values(), lr=_RANKING_RATE, weight_decay=0.01)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, _STEPS)
    held_out: Callable[[], float] = torch.no_grad()(lambda: float(loss(held)))
    best, kept, best_epoch = held_out(), _copied(weights), 0
    for epoch in range(1, max(1, round(_STEPS * _RANKING_BATCH / len(train))) + 1):
        shuffled = train[torch.randperm(len(train), generator=chance)]
        for rows in shuffled.split(_RANKING_BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss(rows).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            slower.step()
        if (now := held_out()) < best:
            best, kept, best_epoch = now, _copied(weights), epoch
        elif epoch - best_epoch >= _PATIENCE:
            break
    return kept, best_epoch


def _copied(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: one.detach().numpy().copy() for name, one in weights.items()}
