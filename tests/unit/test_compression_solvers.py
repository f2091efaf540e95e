"""Wanda, SparseGPT and GPTQ on single layers: against references, and against doing nothing."""

import logging

import numpy as np
import pytest
import torch
from tiny_folders import TINY, save_tiny
from tiny_models import LINES

from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.load import load_model
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.gptq import GPTQSolver, Hessian, damping, library
from rayembed_extras.compression.quantised import rounded, scale_of
from rayembed_papers.pruning.magnitude import Magnitude
from rayembed_papers.pruning.sparsegpt import SparseGPT, SparseGPTSolver
from rayembed_papers.pruning.wanda import SquaredNorms, Wanda, WandaSolver

STRUCTURES = ("unstructured", "2:4", "4:8")
WIDTH, OUTPUTS, TOKENS = 32, 24, 6

TEXTS = [
    CalibrationText(text, role)
    for text in (*LINES[1:], *(line[::-1] for line in LINES[1:]))
    for role in ("query", "document")
]


def layer(seed=0):
    return torch.randn(OUTPUTS, WIDTH, generator=torch.Generator().manual_seed(seed))


def inputs(num_texts, *, seed, of=0):
    """Tokens of texts (N, H): correlated inputs of unlike sizes, alike within a text."""
    shape = torch.Generator().manual_seed(1000 + of)
    mixing = torch.randn(WIDTH, WIDTH, generator=shape) / WIDTH**0.5
    sizes = torch.rand(WIDTH, generator=shape) * 3
    drawn = torch.Generator().manual_seed(seed)
    subjects = torch.randn(num_texts, 1, WIDTH, generator=drawn)
    tokens = torch.randn(num_texts, TOKENS, WIDTH, generator=drawn)
    return ((subjects + tokens).flatten(0, 1) @ mixing) * sizes


def solved(solver, weight, rows):
    made = weight.clone()
    statistic = solver.begin(made)
    for part in rows.split(50):
        statistic.add(part)
    solver.solve(made, statistic, "layer")
    return made


def error(weight, made, rows):
    return float(((weight - made) @ rows.T).square().mean())


def wanda_by_numpy(weight, norms, structure, sparsity):
    kept = weight.copy()
    scores = np.abs(weight.astype(np.float64)) * norms
    for row, of_row in zip(kept, scores, strict=True):
        if structure == "unstructured":
            number, size = len(row) * round(100 * sparsity) // 100, len(row)
        else:
            number, size = map(int, structure.split(":"))
        for start in range(0, len(row), size):
            order = np.argsort(of_row[start : start + size], kind="stable")[:number]
            row[start + order] = 0
    return kept


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_wanda_equals_numpy_bit_for_bit(structure, tied):
    weight, rows = layer(), inputs(16, seed=1)
    if tied:
        weight, rows = weight.round(), torch.ones_like(rows)
    norms = np.sqrt(np.square(rows.numpy().astype(np.float64)).sum(axis=0))
    found = solved(WandaSolver(structure, 0.5), weight, rows)
    np.testing.assert_array_equal(
        found.numpy(), wanda_by_numpy(weight.numpy(), norms, structure, 0.5)
    )


def test_a_share_of_a_row_loses_none_to_the_error_of_its_float():
    weight, norms = torch.randn(3, 100, generator=torch.Generator().manual_seed(3)), np.ones(100)
    mask = WandaSolver("unstructured", 0.29).mask(weight, torch.ones(100))
    np.testing.assert_array_equal(
        weight.masked_fill(mask, 0).numpy(),
        wanda_by_numpy(weight.numpy(), norms, "unstructured", 0.29),
    )
    assert mask.sum(dim=1).tolist() == [29] * 3
    assert Wanda(sparsity=0.29).requested_zeros(3, 100) == 87
    assert SparseGPT(sparsity=0.29).requested_zeros(1, 100) == 29


@pytest.mark.parametrize("structure", STRUCTURES)
def test_wanda_equals_llm_compressor_where_no_scores_are_equal(structure):
    theirs = library("modifiers.pruning.wanda.wanda_sparsify")
    weight, rows = layer(), inputs(16, seed=1)
    module = torch.nn.Linear(WIDTH, OUTPUTS, bias=False)
    module.weight.data = weight.clone()
    sums, _ = theirs.accumulate_row_scalars(rows, module, theirs.make_empty_row_scalars(module), 0)
    zeros, size = (0, 0) if structure == "unstructured" else map(int, structure.split(":"))
    expected = theirs.sparsify_weight(module, {module: sums}, 0.5, zeros, size)
    assert torch.equal(solved(WandaSolver(structure, 0.5), weight, rows), expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_sparsegpt_loses_less_than_magnitude_and_wanda(structure):
    weight, rows = layer(), inputs(64, seed=1)
    errors = {}
    magnitude = weight.masked_fill(Magnitude(structure=structure).mask(weight), 0)
    errors["magnitude"] = error(weight, magnitude, rows)
    solvers = {"wanda": WandaSolver, "sparsegpt": SparseGPTSolver}
    for kind, solver in solvers.items():
        errors[kind] = error(weight, solved(solver(structure, 0.5), weight, rows), rows)
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


def test_sparsegpt_fills_no_zeros_of_a_matrix_that_was_pruned_before():
    weight = layer()
    weight[:, ::2] = 0
    rows = inputs(20, seed=1)
    with pytest.raises(
        ConfigError,
        match=r"50% of the weights of layer are zero already, more than sparsity = 0\.25",
    ):
        solved(SparseGPTSolver("unstructured", 0.25), weight, rows)
    made = solved(SparseGPTSolver("2:4", 0.5), weight, rows)
    assert (made == 0).float().mean() == 0.5


def test_gptq_loses_less_than_rounding():
    weight, rows = layer(), inputs(64, seed=1)
    scale = scale_of(weight, "INT8")
    nearest = rounded(weight, scale, "INT8").float() * scale
    solver = GPTQSolver("INT8")
    made = solved(solver, weight, rows)
    assert error(weight, made, rows) < error(weight, nearest, rows)
    values, own = solver.weights["layer"]
    assert values.dtype == torch.int8
    assert torch.equal(own, scale)
    assert torch.equal(made, values.float() * scale)


@pytest.mark.parametrize("kind", ["sparsegpt", "gptq"])
def test_more_texts_lose_less_on_texts_that_were_not_seen(kind):
    """Mean of five seeds: 256 calibration texts against 8."""
    errors = {8: [], 256: []}
    for seed in range(5):
        weight, unseen = layer(seed), inputs(500, seed=10_000 + seed, of=seed)
        for number, of_number in errors.items():
            solver = GPTQSolver("INT8") if kind == "gptq" else SparseGPTSolver("2:4", 0.5)
            made = solved(solver, weight, inputs(number, seed=seed, of=seed))
            of_number.append(error(weight, made, unseen))
    assert np.mean(errors[256]) < np.mean(errors[8])


def test_more_texts_lose_less_by_wanda_on_texts_that_were_not_seen():
    """Wanda looks at norms alone, which few texts tell: the mean of five seeds is below."""
    errors = {8: [], 256: []}
    for seed in range(5):
        weight, unseen = layer(seed), inputs(500, seed=10_000 + seed, of=seed)
        for number, of_number in errors.items():
            made = solved(WandaSolver("2:4", 0.5), weight, inputs(number, seed=seed, of=seed))
            of_number.append(error(weight, made, unseen))
    assert np.mean(errors[256]) < np.mean(errors[8])


def test_the_library_is_silent():
    module = library("modifiers.pruning.sparsegpt.sgpt_sparsify")
    heard = []
    sink = module.logger.add(heard.append, format="{message}")
    try:
        exec("logger.warning('of the library')", vars(module))
        exec("logger.warning('of another')", {"logger": module.logger, "__name__": "another"})
    finally:
        module.logger.remove(sink)
    assert heard == ["of another\n"]


def test_moments_are_those_of_all_inputs():
    rows = inputs(16, seed=1)
    whole, parts = Hessian(WIDTH, rows.device), Hessian(WIDTH, rows.device)
    norms = SquaredNorms(WIDTH, rows.device)
    whole.add(rows)
    for part in rows.split(7):
        parts.add(part)
        norms.add(part)
    expected = 2 * np.einsum("nh,ng->hg", rows.double(), rows.double()) / len(rows)
    np.testing.assert_allclose(whole.mean(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.mean(), whole.mean())
    np.testing.assert_allclose(norms.sums / len(rows) * 2, np.diag(expected))


def test_inputs_that_depend_on_each_other_are_damped_more_and_broken_ones_refused(caplog):
    assert damping(torch.eye(8), "layer") == 0.01
    nearly = -0.05 * torch.ones(8, 8) + torch.eye(8) * 0.3
    nearly.diagonal().fill_(0.3)
    with caplog.at_level(logging.WARNING):
        assert damping(nearly, "layer") > 0.01
    assert "nearly linearly dependent" in caplog.text
    with pytest.raises(ArtifactError, match=r"second moments .* cannot be inverted"):
        damping(torch.full((8, 8), float("nan")), "layer")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("way", [Wanda, SparseGPT])
@pytest.mark.parametrize("kind", TINY)
def test_the_structure_is_exact_in_every_architecture(kind, way, structure, tmp_path):
    save_tiny(kind, tmp_path / "model")
    asked = way(structure=structure, minimum_texts=8)
    asked.check(tmp_path / "model")
    told = asked.compress(CompressionSource(tmp_path / "model", TEXTS), tmp_path / "pruned")
    state = load_model(tmp_path / "pruned").state_dict()
    for name in told.matrices:
        matrix = state[name].numpy()
        if structure == "unstructured":
            # SparseGPT takes one more of each 128 inputs of a matrix, or of each expert's.
            extra = 3 if way is SparseGPT else 0
            zeros = int((matrix == 0).sum())
            assert matrix.size // 2 <= zeros <= matrix.size // 2 + extra, name
            continue
        number, size = map(int, structure.split(":"))
        experts = matrix.reshape(3, -1, matrix.shape[1]) if "experts" in name else matrix[None]
        if name.endswith(".w2"):
            experts = experts.transpose(0, 2, 1)
        zeros = (experts.reshape(-1, size) == 0).sum(axis=1)
        assert (zeros == number).all(), name
