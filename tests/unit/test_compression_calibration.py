"""Calibration layer after layer: whose tokens count, what matrices meet, who is refused."""

import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_folders import TINY, save_biencoder, save_tiny, tiny_settings
from tiny_models import LINES, save_decoder

from rayembed.errors import ArtifactError, ConfigError, StorageError
from rayembed.models.contract import to_device
from rayembed.models.experts import expert_layers
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry import registered_model
from rayembed_extras.compression import calibration
from rayembed_extras.compression.calibration import solve_layers, tokens_of
from rayembed_extras.compression.compress import _registered_run, calibration_texts
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.matrices import matrices_of
from rayembed_extras.compression.run_settings import CalibrationConfig
from rayembed_papers.pruning.wanda import SquaredNorms, Wanda, WandaSolver

TEXTS = [
    CalibrationText(text, role, instruction)
    for text in (*LINES[1:], "Paris", "cats and dogs in the world")
    for role, instruction in (("query", "Given a question"), ("document", None))
]


class Recorder:
    """Solver that keeps what it is told, and halves the matrices that `change` names."""

    def __init__(self, change=lambda name: False):
        self.change = change
        self.sums = {}
        self.rows = {}

    def begin(self, weight):
        return SquaredNorms(weight.shape[1], weight.device)

    def solve(self, weight, statistic, name):
        self.sums[name] = statistic.sums.clone()
        self.rows[name] = statistic.rows
        if self.change(name):
            weight.mul_(0.5)


def recorded(model, skip=None, change=lambda name: False):
    recorder = Recorder(change)
    solve_layers(model, matrices_of(model, skip), TEXTS, recorder)
    return recorder


def one_by_one(model, tokens):
    for one in tokens:
        yield model.tokenizer.collate([one])


def all_at_once(model, tokens):
    yield to_device(model.tokenizer.collate(list(tokens)), torch.device("cpu"))


def furthest(found, expected):
    """Largest difference of squared norms, as a share of the largest norm of the matrix."""
    return max(
        float((found[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
    )


@pytest.mark.parametrize("kind", TINY)
def test_padding_does_not_count(kind, tmp_path, monkeypatch):
    model = load_model(save_tiny(kind, tmp_path / "model"))
    found = recorded(model)
    monkeypatch.setattr(calibration, "equal_batches", one_by_one)
    alone = recorded(model)
    assert found.rows == alone.rows
    assert furthest(found.sums, alone.sums) < 1e-5
    monkeypatch.setattr(calibration, "equal_batches", all_at_once)
    padded = recorded(model)
    assert furthest(padded.sums, alone.sums) > 1e-2


@pytest.mark.parametrize("kind", TINY)
def test_layers_meet_what_the_whole_model_feeds_them(kind, tmp_path):
    model = load_model(save_tiny(kind, tmp_path / "model"))
    last = {name: f"{name}.{path}" for name, path in last_layers(model).items()}
    # All but the last layers change while they are solved; those then meet the changed model.
    change = lambda name: not any(name.startswith(own) for own in last.values())  # noqa: E731
    found = recorded(model, change=change)
    sums = {}

    def count(name, module, given):
        rows = given[0].reshape(-1, given[0].shape[-1]).double()
        sums[name] = sums.get(name, 0) + rows.square().sum(dim=0)

    linear = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and any(name.startswith(own) for own in last.values())
        and f"{name}.weight" in found.sums
    }
    assert linear
    parts = model.parts if model.uses_context else ["backbone"]
    runs = [run for part in parts for run in calibration._runs(model, part, TEXTS)]
    for name, module in linear.items():
        module.register_forward_pre_hook(partial(count, name))
    with torch.no_grad():
        for run in runs:
            run()
    assert furthest({name: found.sums[name] for name in sums}, sums) < 1e-5


def last_layers(model):
    """Name within each part of its last layer."""
    return {
        name: next(path for path, module in part.named_modules() if module is layers[-1])
        for name, part in model.parts.items()
        for layers in [calibration.layers_of([part])]
    }


def test_texts_have_their_roles_prefixes_and_instructions(tmp_path):
    model = load_model(save_biencoder(tmp_path / "model"))
    found = {tuple(one["input_ids"].tolist()) for one in tokens_of(model, TEXTS)}
    expected = {
        tuple(one["input_ids"].tolist())
        for role, told in (("query", "Given a question"), ("document", ""))
        for text in {text.text for text in TEXTS}
        for one in model.tokenizer([text], role, [told] if told else None)
    }
    assert found == expected


def test_experts_meet_the_tokens_that_are_routed_to_them(tmp_path):
    model = load_model(save_tiny("nomic-moe", tmp_path / "model"))
    found = recorded(model)
    name = next(name for name in found.rows if ".w1" in name).rpartition(", expert")[0]
    rows = [found.rows[f"{name}, expert {expert}"] for expert in range(3)]
    tokens = sum(len(one["input_ids"]) for one in tokens_of(model, TEXTS))
    assert sum(rows) == 2 * tokens
    assert len(set(rows)) > 1
    seen = {}

    def count(module, given):
        states, _, chosen, _ = given
        for expert in range(3):
            own = states[(chosen == expert).any(dim=1)].double()
            seen[expert] = seen.get(expert, 0) + own.square().sum(dim=0)

    expert_layers(model)[0].register_forward_pre_hook(count)
    for text in TEXTS:
        encode(model, [text.text], role=text.role, instruction=text.instruction)
    for expert, sums in seen.items():
        torch.testing.assert_close(found.sums[f"{name}, expert {expert}"], sums)


def test_an_expert_that_no_text_reaches_is_judged_by_its_weights(tmp_path, caplog):
    model = load_model(save_tiny("nomic-moe", tmp_path / "model"))
    (layer,) = expert_layers(model)
    router = next(module for name, module in model.named_modules() if name.endswith("router.layer"))
    with torch.no_grad():
        router.weight.zero_()  # even: the first experts are taken
    (first,) = (m for m in matrices_of(model, None) if m.attribute == "w1")
    given = first.slices[2].clone()
    with caplog.at_level(logging.WARNING):
        solve_layers(model, matrices_of(model, None), TEXTS, WandaSolver("2:4", 0.5))
    assert "expert 2" in caplog.text
    assert "expert 0" not in caplog.text
    kept = first.slices[2] != 0
    groups = given.abs().reshape(-1, 4)
    expected = groups >= groups.sort(dim=1).values[:, 2:3]
    assert torch.equal(kept.reshape(-1, 4), expected)
    assert layer.num_experts == 3


@pytest.fixture
def mixtral(tmp_path):
    """A bi-encoder around a decoder whose experts are parameters of three dimensions."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    parts = tmp_path / "parts"
    save_decoder(parts)  # for its tokenizer
    torch.manual_seed(3)
    transformers.MixtralModel(config).save_pretrained(parts)
    settings = tiny_settings("biencoder", pooling={"kind": "mean"})
    build_model(settings, {"backbone": parts}, seed=1).eval().save(tmp_path / "mixtral")
    return tmp_path / "mixtral"


def test_experts_of_transformers_are_pruned_one_by_one(mixtral, tmp_path):
    model = load_model(mixtral)
    found = recorded(model)
    tokens = sum(len(one["input_ids"]) for one in tokens_of(model, TEXTS))
    for attribute in ("gate_up_proj", "down_proj"):
        name = f"backbone.layers.0.mlp.experts.{attribute}"
        assert sum(found.rows[f"{name}, expert {expert}"] for expert in range(3)) == 2 * tokens
    experts = model.backbone.layers[0].mlp.experts
    inner = []

    def note(hidden_states, top_k_index, top_k_weights):
        for expert in range(3):
            rows = hidden_states[(top_k_index == expert).any(dim=1)]
            gate, up = (rows @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
            inner.append((expert, torch.nn.functional.silu(gate) * up))

    experts.register_forward_pre_hook(lambda module, given: note(*given))
    with torch.no_grad():
        for run in calibration._runs(model, "backbone", TEXTS):
            run()
    for expert in range(3):
        sums = sum(rows.double().square().sum(dim=0) for own, rows in inner if own == expert)
        name = f"backbone.layers.0.mlp.experts.down_proj, expert {expert}"
        torch.testing.assert_close(found.sums[name], sums, rtol=1e-5, atol=1e-12)
    way = Wanda(structure="2:4", minimum_texts=8)
    way.check(mixtral)
    told = way.compress(CompressionSource(mixtral, TEXTS), tmp_path / "pruned")
    whole, changed = told.by_part["experts"]
    assert whole == changed > 0
    state = load_model(tmp_path / "pruned").state_dict()
    for name in told.matrices:
        zeros = (state[name].reshape(-1, 4) == 0).sum(dim=1)
        assert (zeros == 2).all(), name


def test_a_matrix_that_nobody_knows_is_refused_unless_it_is_left_alone(tmp_path):
    model = load_model(save_biencoder(tmp_path / "model"))
    model.backbone.encoder.layer[0].own = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"layer\.0\.own"):
        matrices_of(model, None)
    assert matrices_of(model, ("*.own", "*.pooler.*"))


def test_heads_are_solved_where_they_are_not_left_alone(tmp_path):
    folder = save_tiny("nvembed", tmp_path / "model")
    way = Wanda(minimum_texts=8, skip=("*.mlp.*",))
    told = way.compress(CompressionSource(folder, TEXTS), tmp_path / "pruned")
    heads = [name for name in told.matrices if name.startswith("pooling.")]
    assert heads
    state = load_model(tmp_path / "pruned").state_dict()
    for name in heads:
        assert ((state[name] == 0).sum(dim=1) >= state[name].shape[1] // 2).all()


@pytest.mark.parametrize("kind", TINY)
def test_the_saved_model_gives_the_vectors_of_the_one_in_memory(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    way = Wanda(structure="2:4", minimum_texts=8)
    way.compress(CompressionSource(folder, TEXTS), tmp_path / "pruned")
    model = load_model(folder)
    whole = encode(model, LINES, role="query")
    way.zero(model, matrices_of(model, None), TEXTS)
    expected = encode(model, LINES, role="query")
    found = encode(load_model(tmp_path / "pruned"), LINES, role="query")
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - whole).max() > 1e-2


def test_too_few_texts_are_refused(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    with pytest.raises(ConfigError, match="minimum_texts = 128 calibration texts, but got 12"):
        Wanda().compress(CompressionSource(folder, TEXTS), tmp_path / "pruned")
    assert not (tmp_path / "pruned").exists()


def test_layers_that_are_used_several_times_are_refused_before_work(tmp_path):
    import transformers

    folder = save_biencoder(tmp_path / "model")
    config = transformers.AlbertConfig(
        vocab_size=200,
        embedding_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    parts = tmp_path / "model-parts" / "backbone"
    transformers.AlbertModel(config).save_pretrained(parts)
    build_model(tiny_settings("biencoder"), {"backbone": parts}, seed=1).save(folder)
    with pytest.raises(ConfigError, match="runs its 1 layers 3 times"):
        Wanda().check(folder)


def test_layers_that_do_not_follow_one_another_are_refused(tmp_path):
    model = load_model(save_biencoder(tmp_path / "model"))
    layers = model.backbone.encoder.layer
    layers[1].register_forward_pre_hook(lambda module, given: (given[0] * 2, *given[1:]))
    with pytest.raises(ConfigError, match="layer 2 of the backbone does not read"):
        solve_layers(model, matrices_of(model, None), TEXTS, WandaSolver("2:4", 0.5))


def test_vectors_come_near_after_a_little_pruning(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    way = Wanda(minimum_texts=8, sparsity=0.05)
    way.compress(CompressionSource(folder, TEXTS), tmp_path / "pruned")
    given, found = (
        encode(load_model(at), LINES, role="query") for at in (folder, tmp_path / "pruned")
    )
    assert np.abs(given - found).max() < 0.05
    assert not np.array_equal(given, found)


@pytest.mark.parametrize(
    ("error", "told"), [(StorageError, "^HTTP 503$"), (ArtifactError, "is gone.*calibration.path")]
)
def test_a_storage_that_fails_is_no_plan_that_is_gone(error, told, monkeypatch):
    def fails(run, stage):
        raise error("HTTP 503")

    monkeypatch.setattr("rayembed_extras.compression.compress.plan_of", fails)
    run = SimpleNamespace(name="r", stages=[SimpleNamespace(name="a")])
    seen = StorageError if error is StorageError else ConfigError
    with pytest.raises(seen, match=told):
        calibration_texts(CalibrationConfig(), run, "a", model="m")


@pytest.mark.parametrize(
    ("kept", "looked_in"),
    [("outputs", "/of/the/job"), ("s3://bucket/x", "s3://bucket/x"), ("/whole", "/whole")],
)
def test_a_registered_run_is_looked_for_in_the_jobs_storage(kept, looked_in, monkeypatch):
    """MLflow has of a storage on disk its name alone."""
    run = get_recipe("biencoder-quickstart")
    placement = run.placement.model_copy(update={"storage_path": kept})
    stored = run.model_copy(update={"placement": placement})
    version = SimpleNamespace(run_id="run")
    monkeypatch.setattr(registered_model, "connect", lambda _: None)
    monkeypatch.setattr(registered_model, "get_version", lambda *_: version)
    monkeypatch.setattr(registered_model, "training_run", lambda *_: stored)
    found = _registered_run("models:/x/1", "sqlite:///x", "/of/the/job")
    assert found.placement.storage_path == looked_in
    monkeypatch.setattr(registered_model, "training_run", lambda *_: None)
    assert _registered_run("models:/x/1", "sqlite:///x", "/of/the/job") is None
