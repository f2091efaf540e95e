"""Maps of queries against other libraries' fits, and their files."""

import json

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from sklearn.linear_model import Ridge, RidgeCV

from rayembed.errors import ArtifactError, DataError
from rayembed_extras.index_upgrades import fitting
from rayembed_extras.index_upgrades.fitting import fit_map, fit_ridge, orthogonal_weight
from rayembed_extras.index_upgrades.maps import QueryMap, gelu, identity_map, load_map, unit

KINDS = ("orthogonal", "affine", "low_rank", "mlp", "ranking")


def vectors(count, width, seed=0):
    return unit(np.random.default_rng(seed).standard_normal((count, width)))


def related(count, new, old, noise=0.1, seed=0):
    """Vectors of the same texts by two models, of which the new one knows more."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((count, max(new, old)))
    turns = [random.standard_normal((hidden.shape[1], width)) for width in (new, old)]
    made = [
        hidden @ turn + noise * random.standard_normal((count, turn.shape[1])) for turn in turns
    ]
    return unit(made[0]), unit(made[1])


def test_ridge_is_that_of_scikit_learn():
    x, y = related(120, 12, 7)
    penalties = [10.0**power for power in range(-5, 3)]
    ours = fit_ridge(x, y, penalties)
    theirs = RidgeCV(alphas=penalties).fit(x.astype(float), y.astype(float))
    assert ours.penalty == theirs.alpha_
    np.testing.assert_allclose(ours.weight, theirs.coef_.T, atol=1e-8)
    np.testing.assert_allclose(ours.bias, theirs.intercept_, atol=1e-8)


def test_left_out_errors_are_those_of_fits_without_each_row():
    x, y = (part.astype(float) for part in related(25, 4, 3))
    apart = []
    for row in range(25):
        rest = np.arange(25) != row
        one = fit_ridge(x[rest], y[rest], [0.3])
        apart.append(np.mean((x[row] @ one.weight + one.bias - y[row]) ** 2))
    assert fit_ridge(x, y, [0.3]).errors[0] == pytest.approx(np.mean(apart))


@pytest.mark.parametrize(("new", "old"), [(9, 9), (6, 9), (9, 6)])
def test_orthogonal_maps_are_procrustes_of_padded_vectors(new, old):
    x, y = related(200, new, old)
    ours = orthogonal_weight(x, y)
    width = max(new, old)
    padded = [np.pad(part.astype(float), ((0, 0), (0, width - part.shape[1]))) for part in (x, y)]
    theirs, _ = orthogonal_procrustes(*padded)
    np.testing.assert_allclose(ours, theirs[:new, :old], atol=1e-7)
    small = ours @ ours.T if new <= old else ours.T @ ours
    np.testing.assert_allclose(small, np.eye(min(new, old)), atol=1e-7)


def test_a_turned_space_is_turned_back():
    y = vectors(300, 8)
    turn, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((8, 8)))
    for kind in ("orthogonal", "affine"):
        made = fit_map(kind, unit(y @ turn.T), y)
        assert (made(y @ turn.T) * y).sum(axis=1).min() > 1 - 1e-4, kind


def test_low_rank_of_full_rank_is_affine_and_of_lower_rank_the_nearest(monkeypatch):
    x, y = related(150, 9, 6)
    full, ridge = fit_map("low_rank", x, y), fit_ridge(x, y)
    np.testing.assert_allclose(full(x), unit(x @ ridge.weight + ridge.bias), atol=1e-5)
    monkeypatch.setattr(fitting, "_RANK", 2)
    two = fit_map("low_rank", x, y)
    assert two.arrays["down"].shape == (9, 2)

    def loss(weight):
        centred = [part.astype(float) - part.astype(float).mean(axis=0) for part in (x, y)]
        penalty = two.facts["penalty"] * (weight**2).sum()
        return ((centred[1] - centred[0] @ weight) ** 2).sum() + penalty

    ours = loss(two.arrays["down"].astype(float) @ two.arrays["up"].astype(float))
    # Reference: gradient descent over the same factors, from several starts.
    best = np.inf
    given = [torch.tensor(p.astype(float) - p.astype(float).mean(axis=0)) for p in (x, y)]
    for seed in range(3):
        chance = torch.Generator().manual_seed(seed)
        a = torch.randn(9, 2, generator=chance, dtype=torch.float64, requires_grad=True)
        b = torch.randn(2, 6, generator=chance, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([a, b], max_iter=400, line_search_fn="strong_wolfe")

        def closure(a=a, b=b, optimizer=optimizer):
            optimizer.zero_grad()
            weight = a @ b
            made = ((given[1] - given[0] @ weight) ** 2).sum()
            made = made + two.facts["penalty"] * (weight**2).sum()
            made.backward()
            return made

        optimizer.step(closure)
        best = min(best, closure().item())
    assert ours == pytest.approx(best, rel=1e-4)


def test_affine_is_ridge_regression_of_what_a_rotation_leaves():
    x, y = related(120, 9, 7, noise=0.5)
    turn = orthogonal_weight(x, y)
    made = fit_map("affine", x, y)
    theirs = Ridge(alpha=made.facts["penalty"]).fit(x.astype(float), y - x @ turn)
    np.testing.assert_allclose(made.arrays["weight"], turn + theirs.coef_.T, atol=1e-5)
    np.testing.assert_allclose(made.arrays["bias"], theirs.intercept_, atol=1e-5)


def test_the_mlp_learns_what_no_affine_map_can_and_is_the_same_each_time():
    x = vectors(3000, 6)
    y = unit(np.abs(x) @ np.random.default_rng(1).standard_normal((6, 5)))
    affine, mlp, again = (fit_map(kind, x[:2500], y[:2500]) for kind in ("affine", "mlp", "mlp"))
    near = [float((made(x[2500:]) * y[2500:]).sum(axis=1).mean()) for made in (affine, mlp)]
    assert near[1] > near[0] + 0.02
    assert all((mlp.arrays[name] == again.arrays[name]).all() for name in mlp.arrays)
    given = torch.randn(7, 3)
    torch_gelu = torch.nn.functional.gelu(given, approximate="tanh").numpy()
    np.testing.assert_allclose(gelu(given.numpy()), torch_gelu, atol=1e-6)


def test_the_mlp_is_a_residual_network_trained_by_the_cosine(monkeypatch):
    monkeypatch.setattr(fitting, "_EPOCHS", 9)
    x, y = related(300, 6, 5, noise=0.8)
    ours = fit_map("mlp", x, y, seed=3)
    chance = torch.Generator().manual_seed(3)
    order = torch.randperm(300, generator=chance)
    held, train = order[:30], order[30:]
    given, right = torch.from_numpy(x), torch.from_numpy(y)
    base, layer = torch.nn.Linear(6, 5), torch.nn.Linear(6, 256)
    out = torch.nn.Linear(256, 5)
    affine = fit_map("affine", x[train], y[train])
    with torch.no_grad():
        base.weight.copy_(torch.from_numpy(affine.arrays["weight"]).T)
        base.bias.copy_(torch.from_numpy(affine.arrays["bias"]))
        layer.weight.copy_((torch.randn(6, 256, generator=chance) / 6**0.5).T)
        for zeros in (layer.bias, out.weight, out.bias):
            zeros.zero_()
    residual = torch.nn.Sequential(layer, torch.nn.GELU("tanh"), out)

    def mapped(rows):
        return torch.nn.functional.normalize(base(given[rows]) + residual(given[rows]))

    def loss(rows):
        return 1 - (mapped(rows) * right[rows]).sum(dim=1).mean()

    optimizer = torch.optim.AdamW(residual.parameters(), lr=3e-4, weight_decay=0.01)
    seen = [(loss(held).item(), mapped(slice(None)).detach())]
    for _ in range(9):
        shuffled = train[torch.randperm(270, generator=chance)]
        for first in range(0, 270, 128):
            optimizer.zero_grad()
            loss(shuffled[first : first + 128]).backward()
            optimizer.step()
        seen.append((loss(held).item(), mapped(slice(None)).detach()))
    epoch = int(np.argmin([held_out for held_out, _ in seen]))
    assert ours.facts["epochs"] == epoch > 0
    np.testing.assert_allclose(ours(x), seen[epoch][1].numpy(), atol=1e-5)


def test_the_ranking_map_begins_as_the_affine_one_and_lowers_the_divergence(monkeypatch):
    from scipy.special import rel_entr, softmax

    from rayembed_extras.index_upgrades import fitting

    every = related(1000, 5, 4)
    (x, y), (others, wanted) = (
        [part[rows] for part in every] for rows in (slice(600), slice(600, None))
    )

    def divergence(made):
        of = [softmax(part.astype(float) @ y.T / 0.05, axis=1) for part in (wanted, made(others))]
        return rel_entr(*of).sum(axis=1).mean()

    affine, ranking = fit_map("affine", x, y), fit_map("ranking", x, y)
    assert ranking.facts["epochs"] > 0
    assert divergence(ranking) < 0.9 * divergence(affine)
    again = fit_map("ranking", x, y)
    assert all((ranking.arrays[name] == again.arrays[name]).all() for name in again.arrays)
    # No step: the affine map of all texts.
    monkeypatch.setattr(fitting, "_RANKING_RATE", 0.0)
    still = fit_map("ranking", x, y)
    assert still.facts["epochs"] == 0
    assert all((still.arrays[name] == affine.arrays[name]).all() for name in affine.arrays)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("new", "old"), [(12, 7), (7, 12)])
def test_maps_survive_their_files(tmp_path, kind, new, old):
    x, y = related(300, new, old)
    made = fit_map(kind, x, y)
    assert made.dimensions == (new, old)
    QueryMap(made.kind, made.dimensions, made.arrays, {"model": "new"}).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.json", "map.safetensors"]
    loaded = load_map(tmp_path)
    mapped = loaded(x)
    assert (mapped == made(x)).all()
    assert mapped.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(mapped, axis=1), 1, atol=1e-5)
    assert (mapped * y).sum(axis=1).mean() > 0.5
    assert loaded.facts == {"model": "new"}
    with pytest.raises(ArtifactError, match=rf"\(N, {new}\).* the model new"):
        loaded(y)


def test_the_identity_needs_equal_dimensions(tmp_path):
    assert identity_map(3, 4) is None
    made = identity_map(4, 4)
    made.save(tmp_path)
    x = vectors(5, 4)
    np.testing.assert_allclose(load_map(tmp_path)(x), x, atol=1e-6)


def test_damaged_files_and_too_few_texts_are_refused(tmp_path):
    x, y = related(40, 5, 5)
    with pytest.raises(DataError, match="at least 20 texts"):
        fit_map("affine", x[:19], y[:19])
    fit_map("affine", x, y).save(tmp_path)
    content = (tmp_path / "map.safetensors").read_bytes()
    (tmp_path / "map.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=r"does not have the content .* --road adapter"):
        load_map(tmp_path)
    values = json.loads((tmp_path / "map.json").read_text())
    (tmp_path / "map.json").write_text(json.dumps({**values, "kind": "affine "}))
    with pytest.raises(ArtifactError):
        load_map(tmp_path)
    (tmp_path / "map.json").unlink()
    with pytest.raises(ArtifactError):
        load_map(tmp_path)
