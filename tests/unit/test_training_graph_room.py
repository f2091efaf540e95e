"""What of a step's forward passes is kept, as the memory that is left falls."""

import pytest
import torch
from architecture_contract import STAGE, moved
from made_up_records import made_up_records
from tiny_folders import tiny_parts, tiny_settings
from toy_model import ToyModel
from transformers import AutoModel, BartConfig, BertConfig, BloomConfig

from rayembed.config.placement import Placement
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError
from rayembed.models.adapters import adapted_linear
from rayembed.models.layers import keeps_products, recomputable_layers
from rayembed.models.loading.build import build_model
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.memory import graph_room
from rayembed.training.memory.graph_room import (
    GraphRoom,
    LiveBytes,
    Tokens,
    Way,
    bytes_to_come,
    graph_bytes,
    saved_bytes,
    ways,
)
from rayembed.training.objective import StepSettings

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
    """Eager layers are kept or recomputed whole."""
    caplog.set_level("INFO")
    monkeypatch.setattr(adapted_linear, "keeps_bits", lambda *_: True)  # so that products are less
    model = built(parts)
    expected, none = step(model, False)
    assert none == 0
    states = 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = []
    for left in [10**9, *range(4_000_000, 2_600_000, -60_000), *range(2_600_000, 0, -250_000), 0]:
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
    assert {Way(True, 1), Way(True, 2)} <= set(found)
    assert found[-1] == Way(False, LAYERS)
    assert "layers are recomputed for steps" in caplog.text
    assert "GradCache is used for steps" in caplog.text


def test_compiled_layers_keep_their_products_before_they_keep_nothing(parts, monkeypatch):
    monkeypatch.setattr(adapted_linear, "keeps_bits", lambda *_: True)
    model = built(parts)
    tokens = model.tokenizer([f"text number {i} of several words" for i in range(16)], "document")
    batch = model.tokenizer.collate(tokens)
    number = batch["input_ids"].numel()
    torch._dynamo.reset()
    model.compile_layers("aot_eager")
    room = GraphRoom(torch.device("cpu"), model, to_come=lambda: 0)
    tried, found = chosen(room, monkeypatch), []
    for left in [10**9, *range(4_000_000, 0, -20_000), 0]:
        room._left = left
        room.keeps_graphs(lambda: model(batch), number, Tokens(number, number // 4))
        if tried[-1] not in found:
            found.append(tried[-1])
    order = ways("auto", "auto", LAYERS, products=True)
    assert found == sorted(found, key=order.index), "less memory costs more work"
    assert found[0] == Way(True, 0)
    assert {Way(True, 0, 1), Way(True, 0, 2), Way(True, 1, 1), Way(True, LAYERS)} <= set(found)
    assert found[-1] == Way(False, LAYERS)


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
    layers = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0)]
    found = ways("auto", "auto", 2, products=True)
    assert found == [Way(g, *numbers) for g in (True, False) for numbers in layers]
    assert ways(True, False, 2, products=True) == [Way(False, 0)]
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


def test_a_layer_that_keeps_its_products_holds_these_and_its_input(parts, monkeypatch):
    """What a layer holds, in bytes a token by its widths, where adapters' dropout keeps bits as
    on a GPU.
    """
    monkeypatch.setattr(adapted_linear, "keeps_bits", lambda *_: True)
    model = built(parts)
    config = model.backbone.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    keys = hidden // heads * config.num_key_value_heads
    tokens = model.tokenizer([f"text number {i} of several words" for i in range(16)], "document")
    batch = model.tokenizer.collate(tokens)
    number = batch["input_ids"].numel()

    def held(*numbers):
        model.recompute_layers(*numbers)
        return graph_bytes(lambda: model(batch)) / number

    bare, whole = held(LAYERS), held(0)
    of_layer = held(LAYERS - 1, 1) - bare
    assert held(0, LAYERS) - bare == pytest.approx(LAYERS * of_layer, rel=1e-3)
    outputs = 2 * hidden + 2 * keys + 2 * inner + hidden
    bits = (6 * hidden + inner) // 8
    rank = 2
    expected = 4 * (outputs + 7 * rank) + bits
    # Attention's products are kept with the copies that they made of their inputs.
    assert expected + 4 * hidden <= of_layer < expected + 4 * 8 * hidden
    assert of_layer < 0.9 * (whole - bare) / LAYERS


def of_family(config, **changes):
    """A tiny model of a family in training mode, its settings changed."""
    return AutoModel.from_config(config(vocab_size=50, **changes)).train()


MIDDLE = {"hidden_size": 32, "num_attention_heads": 4}
BART = {
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0},
}


@pytest.mark.parametrize(
    ("config", "shape", "name"),
    [
        (BloomConfig, {**MIDDLE, "n_layer": 1}, "hidden_dropout"),
        (BartConfig, BART, "dropout"),
        (BartConfig, BART, "activation_dropout"),
        (BertConfig, {**MIDDLE, "num_hidden_layers": 1}, "attention_probs_dropout_prob"),
    ],
)
def test_products_are_not_kept_beside_dropout_by_whatever_name(config, shape, name):
    """Some families drop by modules, others by a function that a number is given to."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    none = none if config is BertConfig else {}
    assert keeps_products([of_family(config, **shape | none)])
    assert not keeps_products([of_family(config, **shape | none | {name: 0.1})])


def test_products_are_not_kept_beside_dropout_that_is_drawn_between_them(parts, tmp_path):
    assert keeps_products(built(parts).trained_parts), "adapters draw theirs within a product"
    folder = tiny_parts("biencoder", tmp_path)
    for dropout, expected in [(0.0, True), (0.1, False)]:
        backbone = {"path": "given", "dtype": "float32", "hidden_dropout": dropout}
        settings = tiny_settings("biencoder", backbone=backbone)
        model = build_model(settings, folder, seed=1)
        assert keeps_products(model.trained_parts) == expected
    drops = built(parts)
    drops.backbone.config.attention_dropout = 0.1
    assert not keeps_products(drops.trained_parts)


class Layer(torch.nn.Module):
    """A product and element-wise work."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, states):
        return torch.nn.functional.silu(self.linear(states)).sin()


def test_a_compiled_layer_is_compiled_after_it_was_counted_and_saves_less():
    """A compiler that meets a mode which counts operations leaves code alone from then on."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer, given = Layer(), torch.ones(4, 8)
    forward = lambda: layer(given)  # noqa: E731
    plain = saved_bytes(forward, layer)
    layer.compile(backend="aot_eager")
    graph_bytes(forward)
    compiled = saved_bytes(forward, layer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compiled == plain - 4 * 8 * 4, "what SiLU gives is computed again"
    graph_bytes(forward)
    assert saved_bytes(forward, layer) == compiled


@pytest.mark.slow("a model is compiled for several shapes")
def test_compiled_layers_are_recomputed_as_memory_asks_for_it(parts, monkeypatch):
    torch._dynamo.reset()
    plain = built(parts)
    expected, _ = step(plain, False)
    model = built(parts)
    model.compile_layers("aot_eager")
    batch = model.tokenizer.collate(model.tokenizer(["some words of a text"], "document"))
    forward = lambda: model(batch)  # noqa: E731
    graph_bytes(forward)
    saved = saved_bytes(forward, model)
    assert saved < saved_bytes(lambda: plain(batch), plain)
    model.recompute_layers()
    graph_bytes(forward)
    model.recompute_layers(0)
    assert saved_bytes(forward, model) == saved
    model.recompute_layers(0, LAYERS)
    kept, _ = step(model, False)
    for name, value in expected.items():
        torch.testing.assert_close(kept[name], value, atol=1e-6, rtol=1e-5)
    model.recompute_layers(0)
    needed = 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    monkeypatch.setattr(graph_room, "free_memory", lambda _: needed + 1_000_000)
    gradients, again = step(model, GraphRoom(torch.device("cpu"), model))
    assert again > 0
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, atol=1e-6, rtol=1e-5)
    model.recompute_layers(0)
    assert saved_bytes(forward, model) == saved


def weights(trained, frozen=0, experts=0):
    """A module of so many weights, the experts of them marked as shared out."""
    module = torch.nn.Module()
    for name, size in {"trained": trained, "frozen": frozen, "experts": experts}.items():
        parameter = torch.nn.Parameter(torch.empty(size, device="meta"), name != "frozen")
        if name == "experts":
            parameter.allreduce = False
        module.register_parameter(name, parameter)
    return module


# Of 1,000 trained weights on 4 workers: gradients, then AdamW's two moments, 8 bytes a weight.
@pytest.mark.parametrize(
    ("zero", "once", "gradients", "moments"),
    [
        (0, True, 4000, 8000),
        (1, True, 4000, 2000),
        (2, True, 4000, 2000),
        (3, True, 4000, 2000),
        (0, False, 4000, 8000),
        (1, False, 4000, 2000),
        (2, False, 1000, 2000),
        (3, False, 0, 2000),  # its gradients' buffer is there
    ],
)
def test_what_is_still_to_come_is_divided_as_zero_says(zero, once, gradients, moments):
    placement = Placement(zero_stage=zero, reduce_once=once, workers=4)
    model = weights(1000, frozen=500)
    assert bytes_to_come(model, placement, 4, 12) == gradients + moments
    assert bytes_to_come(model, placement, 4, 12, states=False) == gradients
    assert bytes_to_come(model, placement, 4, 8) == gradients + moments // 2  # Muon's one momentum


def test_experts_that_are_shared_out_are_partitioned_among_those_that_hold_them():
    """Of 600 weights and 800 of experts, in groups of two workers, a worker holds 600 and 400."""
    model = weights(600, experts=400)
    for zero, expected in [(0, 1000 * 12), (1, 1000 * 4 + 1400 // 4 * 8), (2, 4000 + 2800)]:
        placement = Placement(zero_stage=zero, workers=4, expert_parallel=2)
        assert bytes_to_come(model, placement, 4, 12) == expected


def test_a_7b_model_leaves_room_for_graphs_where_workers_share_its_states(monkeypatch):
    """On 8 workers of 80 GB, of which 62 GB are free; 12 bytes for each weight would leave none."""
    model = weights(7 * 10**9)
    monkeypatch.setattr(graph_room, "free_memory", lambda _: 62 * 10**9)
    for zero, once, taken in [(0, True, 84), (1, True, 35), (2, False, 10.5), (3, False, 7)]:
        placement = Placement(zero_stage=zero, reduce_once=once, workers=8)
        found = bytes_to_come(model, placement, 8, 12)
        assert found == taken * 10**9
        room = GraphRoom(torch.device("cuda"), ToyModel(), to_come=lambda found=found: found)
        assert room._room() == pytest.approx(0.9 * max(0, 62 - taken) * 10**9)
