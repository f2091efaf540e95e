"""Pruning by magnitude and what all ways to prune share: masks, files, refusals."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from tiny_folders import TINY, save_biencoder, save_tiny, tiny_settings
from tiny_models import LINES, save_encoder

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.models.saving.export import read_compression
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.layers import Layers
from rayembed_extras.compression.matrices import matrices_of
from rayembed_extras.compression.settings import settings_in
from rayembed_papers.pruning.magnitude import Magnitude
from rayembed_papers.pruning.wanda import Wanda, WandaSolver

STRUCTURES = ("unstructured", "2:4", "4:8")


def magnitude_by_numpy(weight, structure, sparsity):
    """Weights (F, H) without the smallest ones, of equal ones without the first."""
    kept = weight.copy()
    if structure == "unstructured":
        groups = kept.reshape(1, -1)
        number = weight.size * round(100 * sparsity) // 100
    else:
        number, size = map(int, structure.split(":"))
        groups = kept.reshape(-1, size)
    for group in groups:
        group[np.argsort(np.abs(group), kind="stable")[:number]] = 0
    return kept


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_magnitude_equals_numpy_bit_for_bit(structure, tied):
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))
    if tied:
        weight = weight.mul(1.5).round()
    way = Magnitude(structure=structure, sparsity=0.5)
    found = weight.masked_fill(way.mask(weight), 0).numpy()
    np.testing.assert_array_equal(found, magnitude_by_numpy(weight.numpy(), structure, 0.5))


@pytest.mark.parametrize(("percent", "size"), [(29, 100), (57, 100), (70, 30), (50, 35)])
def test_a_share_of_weights_loses_none_to_the_error_of_its_float(percent, size):
    weight = torch.randn(1, size, generator=torch.Generator().manual_seed(3))
    way = Magnitude(sparsity=percent / 100)
    found = weight.masked_fill(way.mask(weight), 0).numpy()
    np.testing.assert_array_equal(
        found, magnitude_by_numpy(weight.numpy(), "unstructured", percent / 100)
    )
    assert (found == 0).sum() == way.requested_zeros(1, size) == percent * size // 100


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", TINY)
def test_the_structure_stands_in_the_files_of_every_architecture(kind, structure, tmp_path):
    save_tiny(kind, tmp_path / "model")
    way = Magnitude(structure=structure)
    way.check(tmp_path / "model")
    told = way.compress(CompressionSource(tmp_path / "model"), tmp_path / "pruned")
    before = load_model(tmp_path / "model").state_dict()
    after = load_model(tmp_path / "pruned")
    state = after.state_dict()
    changed = {name for name, value in state.items() if not torch.equal(value, before[name])}
    assert changed == set(told.matrices)
    assert told.weights == sum(parameter.numel() for parameter in after.parameters())
    assert told.compressed == sum(state[name].numel() for name in told.matrices)
    assert tuple(map(sum, zip(*told.by_part.values(), strict=True))) == (
        told.weights,
        told.compressed,
    )
    stated = read_compression(tmp_path / "pruned")
    assert stated["matrices"] == list(told.matrices)
    assert stated["settings"]["structure"] == structure
    files = {
        f"{path.parent.name}.{name}": value
        for path in (tmp_path / "pruned").rglob("model.safetensors")
        for name, value in safetensors.torch.load_file(path).items()
    }
    for matrix in matrices_of(after, None):
        short = matrix.name if kind != "biencoder" else matrix.name.replace("backbone", "pruned", 1)
        stored = files[short].reshape(-1)
        assert int((stored == 0).sum()) == stored.numel() // 2
        if structure != "unstructured":
            number, size = map(int, structure.split(":"))
            for weight in matrix.slices:
                zeros = (weight.numpy().reshape(len(weight), -1, size) == 0).sum(axis=-1)
                assert (zeros == number).all()


def test_experts_are_pruned_one_by_one_and_along_their_inputs(tmp_path):
    save_tiny("nomic-moe", tmp_path / "model")
    before = load_model(tmp_path / "model").state_dict()
    told = Magnitude(structure="2:4").compress(
        CompressionSource(tmp_path / "model"), tmp_path / "pruned"
    )
    state = load_model(tmp_path / "pruned").state_dict()
    first, second = (
        next(name for name in told.matrices if name.endswith(end)) for end in (".w1", ".w2")
    )
    for expert in range(3):
        rows = slice(48 * expert, 48 * (expert + 1))
        for name, turned in ((first, False), (second, True)):
            given, found = before[name][rows].numpy(), state[name][rows].numpy()
            given, found = (given.T, found.T) if turned else (given, found)
            np.testing.assert_array_equal(
                found, magnitude_by_numpy(np.ascontiguousarray(given), "2:4", 0.5)
            )
    assert told.by_part["experts"][1] == before[first].numel() + before[second].numel()
    assert told.by_part["router"] == (96, 0)


def test_what_is_left_alone_is_a_setting(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    way = Magnitude(skip=("*.attention.*", "*.pooler.*"), sparsity=0.75)
    told = way.compress(CompressionSource(folder), tmp_path / "pruned")
    assert told.by_part["attention"][1] == 0
    assert told.by_part["mlp"][1] > 0
    state = load_model(tmp_path / "pruned").state_dict()
    for name in told.matrices:
        assert int((state[name] == 0).sum()) == state[name].numel() * 3 // 4
    save_tiny("nomic-moe", tmp_path / "moe")
    routed = Magnitude(skip=("*.w1",)).compress(
        CompressionSource(tmp_path / "moe"), tmp_path / "experts"
    )
    assert routed.by_part["experts"][1] > 0
    assert routed.by_part["router"] == (96, 0), "routers are left alone by whatever skip"
    with pytest.raises(ConfigError, match=r"skip has the pattern '\*\.heed\.\*'"):
        Magnitude(skip=("*.heed.*",)).check(folder)
    with pytest.raises(ConfigError, match="leaves no matrix"):
        Magnitude(skip=("*",)).check(folder)


def test_a_second_pruning_tells_the_matrices_of_the_first_too(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    first = Magnitude(skip=("*.attention.*", "*.pooler.*"))
    told = first.compress(CompressionSource(folder), tmp_path / "first")
    Magnitude(skip=("*.intermediate.*", "*.output.dense.*", "*.pooler.*")).compress(
        CompressionSource(tmp_path / "first"), tmp_path / "second"
    )
    found = read_compression(tmp_path / "second")
    assert set(told.matrices) < set(found["matrices"])
    state = load_model(tmp_path / "second").state_dict()
    assert all((state[name] == 0).any() for name in found["matrices"])
    assert found["before"]["matrices"] == list(told.matrices)


def test_a_share_that_takes_no_weight_is_refused(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    with pytest.raises(ConfigError, match="prunes no weight of this model"):
        Magnitude(sparsity=1e-6).check(folder)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("magnitude", Magnitude()),
        ("magnitude,structure=2:4", Magnitude(structure="2:4")),
        ("layers,which=[0,3,5]", Layers(which=(0, 3, 5))),
        (
            "magnitude,sparsity=0.4,skip=['*.attention.*','*.x']",
            Magnitude(sparsity=0.4, skip=("*.attention.*", "*.x")),
        ),
    ],
)
def test_ways_are_read_from_words(text, found):
    assert parse(type(found), settings_in(text)) == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("magnitude,structure", "kind,setting=value"),
        ("magnitude,sparsity=0.1,sparsity=0.9", "sets sparsity twice"),
        ("magnitude,kind=wanda", "sets kind twice"),
        ("magnitude,skip=*.attention.*", "quote values that begin with"),
    ],
)
def test_words_that_are_no_way_are_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        settings_in(text)


def test_instructions_and_prefixes_go_along(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    Magnitude(sparsity=0.001).compress(CompressionSource(folder), tmp_path / "pruned")
    for role in ("query", "document"):
        given, found = (
            encode(load_model(at), LINES, role=role) for at in (folder, tmp_path / "pruned")
        )
        np.testing.assert_allclose(found, given, atol=0.05)


@pytest.mark.parametrize("layout", ["transformers", "sentence-transformers", "nomic"])
def test_models_of_others_are_pruned(layout, tmp_path):
    folder = tmp_path / "model"
    match layout:
        case "transformers":
            save_encoder(folder)
        case "sentence-transformers":
            save_biencoder(folder)
            (folder / "rayembed.json").unlink()
        case "nomic":
            save_tiny("nomic-moe", tmp_path / "own")
            (tmp_path / "own" / "backbone").rename(folder)
    way = Magnitude(structure="2:4")
    way.check(folder)
    told = way.compress(CompressionSource(folder), tmp_path / "pruned")
    state = load_model(tmp_path / "pruned").state_dict()
    assert all(int((state[name] == 0).sum()) == state[name].numel() // 2 for name in told.matrices)


def test_labels_are_names_of_folders():
    assert Magnitude().label == "magnitude-unstructured"
    assert Magnitude(structure="2:4").label == "magnitude-2of4"
    assert Magnitude(sparsity=0.7).label == "magnitude-unstructured-0.7"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"sparsity": 0}, "sparsity"),
        ({"sparsity": 1}, "sparsity"),
        ({"structure": "2:4", "sparsity": 0.6}, "half of the weights to zero"),
        ({"structure": "1:4"}, "structure"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        parse(Magnitude, settings)


def test_a_width_that_groups_do_not_fill_is_refused_before_work(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"intermediate_size": 44}))
    with pytest.raises(ConfigError, match="44 inputs, which 8 does not divide"):
        Magnitude(structure="4:8").check(folder)
    Magnitude(structure="2:4").check(folder)


@pytest.mark.parametrize("structure", ["unstructured", "2:4"])
def test_a_run_that_pruned_too_little_fails_and_leaves_nothing(structure, tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")

    def none(way, weight):
        mask = torch.zeros_like(weight, dtype=torch.bool)
        mask[1:] = True  # enough zeros where there is no structure but the share is 31 of 32 rows
        return mask if structure == "2:4" else ~mask

    monkeypatch.setattr(Magnitude, "mask", none)
    way = Magnitude(structure=structure)
    with pytest.raises(ArtifactError, match=r"zeros|groups"):
        way.compress(CompressionSource(folder), tmp_path / "pruned")
    assert [path.name for path in tmp_path.iterdir() if "pruned" in path.name] == []


@pytest.mark.parametrize("kind", [Magnitude, Wanda])
def test_a_run_that_pruned_too_much_fails_and_zeros_of_the_source_do_not_count(
    kind, tmp_path, monkeypatch
):
    folder = save_biencoder(tmp_path / "model")
    texts = [CalibrationText(line) for line in LINES[1:]]
    way = kind() if kind is Magnitude else kind(minimum_texts=1)
    Magnitude(sparsity=0.75).compress(CompressionSource(folder), tmp_path / "sparse")
    told = way.compress(CompressionSource(tmp_path / "sparse", texts), tmp_path / "again")
    state = load_model(tmp_path / "again").state_dict()
    assert all(int((state[n] == 0).sum()) == state[n].numel() * 3 // 4 for n in told.matrices)
    solver = Magnitude if kind is Magnitude else WandaSolver
    mask = solver.mask

    def one_more(self, weight, *given):
        found = mask(self, weight, *given)
        found.view(-1)[(~found).view(-1).nonzero()[0]] = True
        return found

    monkeypatch.setattr(solver, "mask", one_more)
    with pytest.raises(ArtifactError, match=r"\(0 zeros before pruning\), but 512 were requested"):
        way.compress(CompressionSource(folder, texts), tmp_path / "pruned")
    assert not (tmp_path / "pruned").exists()


@pytest.mark.parametrize("structure", ["unstructured", "2:4"])
def test_what_pruning_by_magnitude_writes_is_a_start(structure, tmp_path):
    whole = save_biencoder(tmp_path / "whole")
    told = Magnitude(structure=structure).compress(CompressionSource(whole), tmp_path / "pruned")
    config = tiny_settings("biencoder", keep_zeros=True)
    check_buildable(config, tmp_path / "pruned")
    kept = build_model(config, tmp_path / "pruned", seed=1).kept_zeros
    assert set(kept) == set(told.matrices)
    assert all(zeros.float().mean() == 0.5 for zeros in kept.values())
