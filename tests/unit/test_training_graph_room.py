"""What of a step's forward passes is kept, as the memory that is left falls."""

import pytest
import torch
from architecture_contract import STAGE, moved
from made_up_records import made_up_records
from tiny_folders import tiny_parts, tiny_settings
from toy_model import ToyModel

from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError
from rayembed.models.build import build_model
from rayembed.models.layers import recomputable_layers
from rayembed.training import graph_room
from rayembed.training.graph_room import GraphRoom, Way, graph_bytes, saved_bytes, ways
from rayembed.training.live_bytes import LiveBytes
from rayembed.training.step import EngineModule, StepSettings, run_step

LAYERS = 2


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return tiny_parts("nvembed", tmp_path_factory.mktemp("parts"))


def built(parts):
    settings = tiny_settings("nvembed", lora={"rank": 2, "alpha": 4, "dropout": 0.5})
    return moved(build_model(settings, parts, seed=1)).train()


def step(model, room, budget=60):
    """Gradients, layers recomputed, and whether a graph was made anew."""
    batch = make_step_batch(0, made_up_records(8), 2, model.tokenizer)
    model.zero_grad()
    torch.manual_seed(1)
    run_step(
        model,
        EngineModule(model),
        lambda loss, last: loss.backward(),
        batch,
        STAGE,
        StepSettings(budget, room, torch.device("cpu")),
    )
    again = sum(layer.gradient_checkpointing for layer in recomputable_layers(model.trained_parts))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}, again


def chosen(room, monkeypatch):
    """Ways that were tried by a room, the last of which was taken."""
    tried = []
    fits = room._fits

    def noted(way, *given):
        tried.append(way)
        return fits(way, *given)

    monkeypatch.setattr(room, "_fits", noted)
    return tried


def test_as_much_is_kept_as_fits_and_gradients_stay(parts, monkeypatch, caplog):
    caplog.set_level("INFO")
    model = built(parts)
    expected, none = step(model, False)
    assert none == 0
    states = 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = []
    for left in [10**9, *range(3_000_000, 0, -250_000), 0]:
        monkeypatch.setattr(graph_room, "free_memory", lambda _, left=left: states + left)
        room = GraphRoom(torch.device("cpu"), model)
        tried = chosen(room, monkeypatch)
        gradients, again = step(model, room)
        assert again == tried[-1].recomputed
        if tried[-1] not in found:
            found.append(tried[-1])
            for name, value in expected.items():
                torch.testing.assert_close(gradients[name], value, atol=1e-6, rtol=1e-5)
    order = ways("auto", "auto", LAYERS)
    assert found == sorted(found, key=order.index), "less memory costs more work"
    assert found[0] == Way(True, 0)
    assert Way(True, 1) in found
    assert found[-1] == Way(False, LAYERS)
    assert "layers are recomputed above" in caplog.text
    assert "GradCache is used above" in caplog.text


def test_dropout_matters_to_these_gradients(parts):
    """The control: another draw moves them by more than the test above allows."""
    model = built(parts)
    expected, _ = step(model, False)
    other, _ = step(model, False, budget=10**6)
    assert max((other[n] - expected[n]).abs().max() for n in expected) > 1e-4


def test_what_is_settled_is_not_measured(parts, monkeypatch):
    monkeypatch.setattr(graph_room, "free_memory", lambda _: pytest.fail("asked"))
    model = built(parts)
    for recompute, layers in [(True, LAYERS), (False, 0)]:
        model.recompute_layers(0)
        room = GraphRoom(torch.device("cpu"), model, grad_cache=True, recompute=recompute)
        assert step(model, room)[1] == layers
    with pytest.raises(ConfigError, match="gradient_checkpointing=false"):
        GraphRoom(torch.device("cpu"), ToyModel(), recompute=True)


def test_the_order_is_that_of_the_work():
    assert ways("auto", "auto", 2) == [Way(g, n) for g in (True, False) for n in (0, 1, 2)]
    assert ways(True, False, 2) == [Way(False, 0)]
    assert ways(False, True, 2) == [Way(True, 2)]


def test_saved_bytes_are_those_that_a_graph_holds_and_are_not_held(parts):
    model = built(parts)
    tokens = model.tokenizer([f"text number {i} of several words" for i in range(16)], "document")
    batch = model.tokenizer.collate(tokens)
    forward = lambda: model(batch)  # noqa: E731
    held, saved = graph_bytes(forward), saved_bytes(forward, model)
    assert saved == pytest.approx(held, rel=0.15)
    with LiveBytes() as live:
        saved_bytes(forward, model)
    assert live.peak < 0.6 * held
    state = torch.get_rng_state()
    saved_bytes(forward, model)
    assert torch.equal(torch.get_rng_state(), state)
