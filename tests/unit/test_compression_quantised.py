"""Weights of 8 bits: files, what reads them, and the same vectors as the model they stand for."""

import json
from importlib.metadata import version

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tiny_folders import TINY, save_biencoder, save_tiny, tiny_settings
from tiny_models import LINES, save_decoder, save_nomic_encoder

from rayembed import errors
from rayembed.assets.finite import check_finite_files
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading import backbones
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import load_weights, read_header
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.passes.encoding import encode
from rayembed.models.saving.export import read_compression
from rayembed.registry.register import format_requirements
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.gptq import GPTQ
from rayembed_extras.compression.matrices import matrices_of
from rayembed_extras.compression.quantised import Fp8, Int8, Quantity, _write_part, nearest_weights
from rayembed_extras.compression.settings import COMPRESSIONS
from rayembed_papers.pruning.sparsegpt import SparseGPT

TEXTS = [
    CalibrationText(text, role)
    for text in (*LINES[1:], *(line[::-1] for line in LINES[1:]))
    for role in ("query", "document")
]
WAYS = [Int8(), Fp8(), GPTQ(minimum_texts=8)]
IDS = [way.label for way in WAYS]
KINDS = [kind for kind in TINY if kind != "nomic-moe"]
STORED = {"int8": "I8", "gptq": "I8", "fp8": "F8_E4M3"}


def save_decoder_embedder(folder, *, kind="biencoder", **changes):
    """A decoder in plain format, whose vectors are its last token's."""
    parts = folder.with_name(f"{folder.name}-parts")
    save_decoder(parts, "mistral")
    settings = tiny_settings(kind, pooling={"kind": "eos"}, **changes)
    build_model(settings, {"backbone": parts}, seed=1).eval().save(folder)
    return folder


def in_memory(folder, way):
    """The model with weights and inputs rounded by formulas, in hooks."""
    model = load_model(folder)

    def rounded(values):
        largest = values.abs().amax(dim=-1, keepdim=True)
        if way.kind == "fp8":
            scale = (largest / 448).clamp(min=torch.finfo(torch.float32).tiny)
            return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        scale = (largest / 127.5).clamp(min=torch.finfo(torch.float32).tiny)
        return (values / scale).round().clamp(-128, 127) * scale

    with torch.no_grad():
        for matrix in matrices_of(model, way.skip):
            matrix.slices[0].copy_(rounded(matrix.slices[0]))
            matrix.module.register_forward_pre_hook(
                lambda module, given: (rounded(given[0]), *given[1:])
            )
    return model


@pytest.mark.parametrize("way", [Int8(), Fp8()], ids=["int8", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_model_in_memory(kind, way, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    way.check(folder)
    way.compress(CompressionSource(folder), tmp_path / "small")
    expected = encode(in_memory(folder, way), LINES, role="document")
    found = encode(load_model(tmp_path / "small"), LINES, role="document")
    # Rounding of an input to its neighbour is the largest thing that float32's order may change.
    np.testing.assert_allclose(found, expected, atol=2e-3)
    plain = encode(load_model(folder), LINES, role="document")
    assert np.abs(found - plain).mean() > 3 * np.abs(found - expected).mean()


@pytest.mark.parametrize("way", WAYS, ids=IDS)
@pytest.mark.parametrize("save", [save_biencoder, save_decoder_embedder])
def test_transformers_and_sentence_transformers_read_the_files(save, way, tmp_path):
    folder = save(tmp_path / "model")
    way.check(folder)
    told = way.compress(CompressionSource(folder, TEXTS), tmp_path / "small")
    header = read_header(tmp_path / "small" / "model.safetensors")
    kinds = {name: value["dtype"] for name, value in header.items()}
    quantised = {name for name, kind in kinds.items() if kind == STORED[way.kind]}
    assert sum(int(np.prod(header[name]["shape"])) for name in quantised) == told.compressed
    size = lambda at: (at / "model.safetensors").stat().st_size  # noqa: E731
    assert size(folder) - size(tmp_path / "small") > 2.5 * told.compressed
    ours = encode(load_model(tmp_path / "small"), LINES, role="query")
    theirs = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    np.testing.assert_allclose(theirs.encode(LINES, prompt_name="query"), ours, atol=1e-6)
    auto = transformers.AutoModel.from_pretrained(tmp_path / "small").eval()
    own = load_model(tmp_path / "small").backbone
    ids = torch.arange(10).unsqueeze(0) + 5
    with torch.no_grad():
        states = [model(input_ids=ids).last_hidden_state for model in (auto, own)]
    torch.testing.assert_close(*states)
    assert read_compression(tmp_path / "small")["settings"]["kind"] == way.kind
    check_loadable(tmp_path / "small")


def test_gptq_stores_other_weights_than_rounding(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    Int8().compress(CompressionSource(folder), tmp_path / "int8")
    GPTQ(minimum_texts=8).compress(CompressionSource(folder, TEXTS), tmp_path / "gptq")
    first, second = (
        load_weights(tmp_path / name / "model.safetensors") for name in ("int8", "gptq")
    )
    assert first.keys() == second.keys()
    name = "encoder.layer.0.intermediate.dense.weight"
    apart = (first[name].int() - second[name].int()).abs()
    assert 0 < int(apart.max()) < 40
    assert torch.equal(first[f"{name}_scale"], second[f"{name}_scale"])


def test_what_is_left_alone_stays_as_it_is(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    way = Int8(skip=("*.attention.*", "*.pooler.*"))
    told = way.compress(CompressionSource(folder), tmp_path / "small")
    assert told.by_part["attention"][1] == 0
    stated = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert "encoder.layer.0.attention.self.query" in stated["ignore"]
    assert "encoder.layer.0.output.dense" not in stated["ignore"]
    before, after = (load_model(at).state_dict() for at in (folder, tmp_path / "small"))
    name = "backbone.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(before[name], after[name])


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_zeros_of_a_pruned_model_stay(way, tmp_path):
    folder = save_biencoder(tmp_path / "model")
    pruned = SparseGPT(structure="2:4", minimum_texts=8)
    told = pruned.compress(CompressionSource(folder, TEXTS), tmp_path / "pruned")
    way.compress(CompressionSource(tmp_path / "pruned", TEXTS), tmp_path / "small")
    state = load_model(tmp_path / "small").state_dict()
    for name in told.matrices:
        assert ((state[name].reshape(-1, 4) == 0).sum(dim=1) >= 2).all()
    before = read_compression(tmp_path / "small")["before"]
    assert before["settings"]["kind"] == "sparsegpt"


def test_files_in_shards_are_rewritten_each(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    model = load_model(folder)
    weights = nearest_weights("INT8", matrices_of(model, None))
    shards = tmp_path / "shards"
    model.backbone.save_pretrained(shards, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    _write_part("INT8", "backbone", model.backbone, weights, shards)
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    stored = {
        name: path.name for path in shards.glob("*.safetensors") for name in load_weights(path)
    }
    assert index["weight_map"] == stored
    ids = torch.arange(10).unsqueeze(0) + 5
    Int8().compress(CompressionSource(folder), tmp_path / "small")
    states = [
        transformers.AutoModel.from_pretrained(at).eval()(input_ids=ids).last_hidden_state
        for at in (shards, tmp_path / "small")
    ]
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", ["int8", "fp8", "gptq"])
def test_an_encoder_of_its_own_is_refused_before_work(kind, tmp_path):
    folder = save_tiny("nomic-moe", tmp_path / "model")
    with pytest.raises(ConfigError, match="is rayembed's own encoder"):
        COMPRESSIONS.classes()[kind]().check(folder)


def test_layers_that_the_format_does_not_know_are_refused_before_work(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    config = transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    parts = tmp_path / "gpt2"
    save_decoder(parts)
    transformers.GPT2Model(config).save_pretrained(parts)
    build_model(tiny_settings("biencoder"), {"backbone": parts}, seed=1).save(folder)
    with pytest.raises(ConfigError, match="belongs to a Conv1D"):
        Int8().check(folder)


def test_weights_that_are_saved_under_other_names_are_refused_before_work(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    parts = save_nomic_encoder(tmp_path / "nomic")
    build_model(tiny_settings("biencoder"), {"backbone": parts}, seed=1).save(folder)
    with pytest.raises(ConfigError, match="under other names"):
        Int8().check(folder)
    with pytest.raises(ConfigError, match="under other names"):
        Int8().compress(CompressionSource(folder), tmp_path / "small")


def test_heads_are_refused_before_work(tmp_path):
    folder = save_tiny("nvembed", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"pooling\..* is outside of one"):
        Int8(skip=("*.mlp.*",)).check(folder)


@pytest.mark.parametrize(
    ("way", "package"),
    [
        (Int8(), "compressed_tensors"),
        (Fp8(), "compressed_tensors"),
        (GPTQ(), "llmcompressor"),
        (SparseGPT(), "llmcompressor"),
    ],
    ids=lambda one: getattr(one, "kind", one),
)
def test_a_package_that_is_missing_is_named_with_its_command(way, package, tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")
    found = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=rf"{package}.*pip install '\.\[compress\]'"):
        way.check(folder)
    with pytest.raises(ConfigError, match="pip install"):
        way.compress(CompressionSource(folder, TEXTS * 20), tmp_path / "small")


def test_a_registered_model_asks_for_what_reads_its_weights_and_is_finite(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    assert format_requirements(folder) == []
    for way in (Int8(), Fp8()):
        way.compress(CompressionSource(folder), tmp_path / way.label)
        (asked,) = format_requirements(tmp_path / way.label)
        assert asked == f"compressed-tensors=={version('compressed-tensors')}"
        check_finite_files(tmp_path / way.label)
    path = tmp_path / "fp8" / "model.safetensors"
    tensors = load_weights(path)
    tensors["encoder.layer.0.output.dense.weight"][0, 0] = float("nan")
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"1 of the 1,536 numbers of 'encoder\.layer\.0"):
        check_finite_files(tmp_path / "fp8")


def test_a_quantised_model_is_not_read_without_its_package(tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")
    Int8().compress(CompressionSource(folder), tmp_path / "small")
    monkeypatch.setattr(backbones, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match="pip install"):
        load_model(tmp_path / "small")
    load_model(folder)


def test_a_quantised_model_is_neither_trained_nor_compressed_nor_saved(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    Int8().compress(CompressionSource(folder), tmp_path / "small")
    with pytest.raises(ConfigError, match="are quantised"):
        load_model(tmp_path / "small").save(tmp_path / "again")
    with pytest.raises(ConfigError, match="are quantised"):
        build_model(tiny_settings("biencoder"), {"backbone": tmp_path / "small"}, seed=1)
    for way in (Int8(), SparseGPT()):
        with pytest.raises(ConfigError, match="are quantised"):
            way.check(tmp_path / "small")


def test_weights_that_come_back_otherwise_fail_and_leave_nothing(tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")
    right = nearest_weights

    def wrong(scheme, matrices):
        made = right(scheme, matrices)
        name = next(iter(made))
        return made | {name: Quantity(made[name].values.float(), made[name].scale)}

    monkeypatch.setattr("rayembed_extras.compression.quantised.nearest_weights", wrong)
    with pytest.raises(ArtifactError, match="was saved as F32"):
        Int8().compress(CompressionSource(folder), tmp_path / "small")
    assert not [path for path in tmp_path.iterdir() if "small" in path.name]
