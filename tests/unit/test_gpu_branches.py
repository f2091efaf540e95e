"""What is written for GPUs, run on a CPU whose tensors say that they are on one.

`test_gpu_gate.py` runs this file, and demands that it reaches all conditions on devices.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architecture_contract import moved
from every_loss import stage_of
from made_up_records import made_up_records
from pretended_gpu import GPU, OnGpu, pretended_gpu
from tiny_folders import TINY, save_tiny, tiny_parts, tiny_settings
from tiny_models import LINES, save_decoder, save_encoder
from torch import nn
from toy_model import ToyModel
from transformers import AutoModel

from rayembed.api.embedder import load
from rayembed.config.data_run import TeacherPlacement
from rayembed.config.placement import Placement
from rayembed.data.clusters.kmeans import kmeans, nearest
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.vectors import teacher
from rayembed.distributed import collectives, random_state
from rayembed.errors import ConfigError
from rayembed.machine import gpu_check, hardware
from rayembed.models.attention import varlen
from rayembed.models.attention.unpadded import packs
from rayembed.models.loading.backbones import check_bidirectional
from rayembed.models.loading.build import build_model
from rayembed.models.nvembed import pooling
from rayembed.models.passes.encoding import default_budget, encode
from rayembed.pipeline.run import runtime as pipeline_here
from rayembed.pipeline.run.runtime import Here, _this_machine
from rayembed.search import tiles
from rayembed.search.exact import top_k
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.memory.graph_room import GraphRoom
from rayembed.training.memory.stage_memory import StageMemory
from rayembed.training.objective import StepSettings

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    with pretended_gpu(monkeypatch):
        yield


def built(kind, folder):
    return moved(build_model(tiny_settings(kind), tiny_parts(kind, folder), seed=1))


def stepped(model, device, cache):
    """Report and gradients of a step, on the host."""
    model.train().zero_grad()
    torch.manual_seed(1)
    batch = make_step_batch(0, made_up_records(8), 2, model.tokenizer)
    settings = StepSettings(90, cache, device, pass_cost_tokens=1)
    assert settings.pins == (device == GPU)
    engine, back = EngineModule(model), lambda loss, last: loss.backward()
    report = run_step(model, engine, back, batch, stage_of({}), settings)
    grads = {n: p.grad.cpu().float() for n, p in model.named_parameters() if p.grad is not None}
    return report, {name: grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize("kind", TINY)
def test_a_step_on_a_gpu_has_the_gradients_of_a_cpu(kind, tmp_path, monkeypatch):
    model = built(kind, tmp_path).to(torch.bfloat16)
    assert not packs(model)
    model.unpadded = "always"
    report, expected = stepped(model, CPU, False)
    with pretended_gpu(monkeypatch):
        model.unpadded = "auto"
        model.to("cuda")
        assert packs(model), "tried, and found alike"
        for cache in (False, True):
            on_gpu, found = stepped(model, GPU, cache)
            assert on_gpu.loss == pytest.approx(report.loss, rel=0.02)
            assert on_gpu.tokens == report.tokens == on_gpu.padded_tokens
            assert found.keys() == expected.keys()
            size = torch.stack([grad.norm() for grad in expected.values()]).norm()
            apart = torch.stack([(found[n] - expected[n]).norm() for n in expected]).norm()
            assert apart < 0.05 * size  # bfloat16 in other products


@pytest.mark.parametrize("kind", TINY)
def test_vectors_of_a_gpu_are_those_of_a_cpu(kind, tmp_path, monkeypatch):
    model = built(kind, tmp_path).to(torch.bfloat16).eval()
    texts = [*LINES[1:], "Paris", "cats " * 30]
    expected = encode(model, texts, role="document", tokens_per_batch=60)
    assert default_budget(model) > 0
    with pretended_gpu(monkeypatch):
        model.to("cuda")
        found = encode(model, texts, role="document", tokens_per_batch=60)
        assert default_budget(model) > 0
    assert (found * expected).sum(1).min() > 0.99


class Mixed(ToyModel):
    """Takes a tensor of the host for one of its device."""

    def _mean(self, batch):
        mean = super()._mean(batch)
        return mean * torch.ones(mean.shape[-1])


def test_the_control_a_tensor_that_was_left_on_the_host_is_refused(gpu):
    stepped(ToyModel(context=True).to("cuda"), GPU, True)
    with pytest.raises(RuntimeError, match="on the same device, but found cuda:0 and cpu"):
        stepped(Mixed(context=True).to("cuda"), GPU, True)


def test_wide_heads_of_the_pool_attend_by_products(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, n, 264, generator=draw) for n in (5, 3, 3)]
    expected = pooling._attend(*given)
    products = []
    monkeypatch.setattr(
        pooling,
        "attend_by_products",
        lambda *of, made=pooling.attend_by_products, **more: (
            products.append(1) or made(*of, **more)
        ),
    )
    with pretended_gpu(monkeypatch):
        found = pooling._attend(*(x.to("cuda") for x in given))
        assert products
        pooling._attend(*(x[..., :64].to("cuda") for x in given))
        assert len(products) == 1
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, atol=1e-5, rtol=1e-5)


def test_a_gpu_with_room_computes_larger_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(batch_loss, "_BLOCK", 100)

    def blocks(device):
        sizes = []

        def of_block(rows):
            sizes.append(rows.stop - rows.start)
            return (torch.zeros(len(range(40)[rows])),)

        (whole,) = batch_loss.in_row_blocks(of_block, 40, 50, True, device)
        assert len(whole) == 40
        return sizes

    assert max(blocks(CPU)) == 2
    with pretended_gpu(monkeypatch):
        assert max(blocks(GPU)) == 40
    few = 64 * 256
    with pretended_gpu(monkeypatch, free=4 * few, total=1 << 40):
        assert max(blocks(GPU)) == 5


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_a_search_on_a_gpu_finds_what_one_on_a_cpu_finds(capability, monkeypatch):
    draw = np.random.default_rng(0)
    queries, documents = (draw.integers(-9, 9, (n, 16)).astype(np.float32) for n in (20, 3000))
    expected = top_k(queries, [documents], 5)
    with pretended_gpu(monkeypatch, capability):
        assert tiles.rounds_first(GPU) == (capability >= (8, 0))
        assert tiles.tiles_of(GPU, 16) != tiles.CPU
        found = top_k(queries, [documents], 5, "cuda")
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])


def test_clusters_are_made_on_gpus_where_faiss_has_some(monkeypatch):
    import faiss

    rows = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    expected = kmeans(rows, 4, iterations=3, seed=1)
    moves = []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    monkeypatch.setattr(
        faiss,
        "index_cpu_to_all_gpus",
        lambda index, *_, **__: moves.append(1) or index,
        raising=False,
    )
    found = kmeans(rows, 4, iterations=3, seed=1, device="cuda")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    nearest(rows, found, "cuda")
    assert len(moves) >= 1
    made = len(moves)
    nearest(rows, found, "cpu")
    assert len(moves) == made


def test_tasks_that_need_a_gpu_get_one_where_there_is_one(monkeypatch):
    def run(needs, **settings):
        context = Here().data_context(data_run(**settings))
        return list(context.execute(lambda *given: given, [1, 2], needs))

    assert run("gpu or machine") == [(1,), (2,)]
    assert run("cpu") == [(1,), (2,)]
    with pretended_gpu(monkeypatch):
        assert run("gpu or machine") == [(1, "cuda"), (2, "cuda")]
        assert run("cpu") == [(1,), (2,)]
        assert run("gpu or machine", use_gpu=False) == [(1,), (2,)]
        assert _this_machine()["GPU"] == 1


def data_run(**settings):
    """What a context of data preparation reads of a run."""
    data = SimpleNamespace(root="")
    return SimpleNamespace(placement=TeacherPlacement(**settings), seed=0, data=data)


def test_without_gpus_teachers_have_the_number_type_of_cpus(monkeypatch):
    asked = []
    monkeypatch.setattr(pipeline_here, "auto_precision", asked.append)
    Here().data_context(data_run(use_gpu=False)).teacher_loader.precision()
    assert asked == ["cpu"]


def test_a_model_is_loaded_onto_the_gpu(tmp_path, monkeypatch):
    folder = save_tiny("biencoder", tmp_path / "model")
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        load(folder, device="cuda")
    on_cpu = load(folder, device="cpu").encode(["a text"])
    with pretended_gpu(monkeypatch):
        on_gpu = load(folder, device="cuda").encode(["a text"])
    np.testing.assert_allclose(on_gpu, on_cpu, atol=0.05)


def test_random_state_of_the_gpu_is_replayed(monkeypatch):
    streams = {"cuda": torch.tensor([7], dtype=torch.uint8)}
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: _forked(devices, streams))
    assert "cuda" not in random_state.capture()
    with random_state.replayed(random_state.capture()):
        pass
    with pretended_gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: streams["cuda"])
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda x: streams.update(cuda=x))
        state = random_state.capture()
        streams["cuda"] = torch.tensor([9], dtype=torch.uint8)
        with random_state.replayed(state):
            assert streams["cuda"].item() == 7
        assert streams["cuda"].item() == 9


class _forked:
    """`fork_rng`, which itself would ask the GPU."""

    def __init__(self, devices, streams):
        self.streams, self.kept = streams, dict(streams) if devices else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.kept is not None:
            self.streams.update(self.kept)


def test_memory_and_budgets_are_the_gpus(monkeypatch):
    small, large = nn.Linear(4, 4), nn.Linear(10**5, 10**5, device="meta")
    assert hardware.pass_cost_tokens("cpu", small) == hardware.pass_cost_tokens("cpu", large)
    assert hardware.micro_batch_tokens("cpu") > 0
    with pretended_gpu(monkeypatch, capability=(8, 6), free=5 << 30, total=8 << 30):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 << 30)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 30)
        assert hardware.free_memory("cuda:0") == 7 << 30
        assert hardware.total_memory() == 8 << 30
        assert hardware.device_label("cuda") == "pretended of 8.0 GiB"
        assert hardware.default_device() == "cuda"
        assert hardware.micro_batch_tokens("cuda") > 0
        costs = [hardware.pass_cost_tokens("cuda", model) for model in (small, large)]
        assert costs[0] > costs[1]
        assert hardware.auto_precision().why == "this GPU (pretended) has units for it"
    assert hardware.free_memory("cpu") > 0
    assert hardware.default_device() == "cpu"
    assert hardware.device_label("cpu") == "CPU"


@pytest.mark.parametrize("wanted", [True, False])
def test_the_same_bits_are_a_matter_of_gpus(wanted):
    placement = Placement(deterministic=wanted)
    for device in (GPU, CPU):
        room = StageMemory(stage_of({}), placement, device).room(ToyModel(context=False), int)
        assert room._grad_cache == (True if wanted and device == GPU else "auto")


def test_a_node_tells_what_its_gpu_computes(monkeypatch):
    with pretended_gpu(monkeypatch, capability=(7, 5)):
        facts = gpu_check.gpu_facts()
    assert (facts.gpu, facts.error) == ("pretended", None)


def test_what_may_be_kept_is_a_share_of_the_gpus_memory(monkeypatch):
    model = ToyModel(context=False)
    with pretended_gpu(monkeypatch, free=10 << 30):
        on_gpu = GraphRoom(GPU, model)._room()
    states = GraphRoom(GPU, model)._to_come()
    assert on_gpu == pytest.approx(0.9 * ((10 << 30) - states))
    assert GraphRoom(CPU, model)._room() > 0


def test_gradients_of_gathered_vectors_go_to_their_workers_alone(monkeypatch):
    """By NCCL's reduce-scatter, where gloo adds all of them up on each worker."""
    calls = []

    def reduce_scatter(own, grad):
        calls.append("scattered")
        own.copy_(2 * grad[:3])

    def all_reduce(grad):
        calls.append("reduced")
        grad.mul_(2)

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 0)
    monkeypatch.setattr(collectives.dist, "reduce_scatter_single", reduce_scatter)
    monkeypatch.setattr(collectives.dist, "all_reduce", all_reduce)
    grad = torch.arange(12.0).view(6, 2)
    found = [collectives._Gather.backward(None, one) for one in (grad, grad.as_subclass(OnGpu))]
    assert calls == ["reduced", "scattered"]
    for one in found:
        assert one.tolist() == (2 * grad[:3]).tolist()


TEXTS = ["a text of some words", "another", "cats and dogs and cats"]


def test_teachers_encode_on_gpus_as_on_cpus(tmp_path, monkeypatch):
    folder = str(save_tiny("biencoder", tmp_path / "teacher"))
    weights = teacher.weights_fingerprint(teacher.resolve_model(folder))
    given = (folder, weights, 40, "", "")
    vectors = []
    for device in ("cpu", "cuda"):
        with pretended_gpu(monkeypatch):
            encoded = teacher._load.__wrapped__(*given, device, "bfloat16")
            vectors.append(encoded(TEXTS, "document"))
    assert (vectors[0] * vectors[1]).sum(1).min() > 0.99


@pytest.mark.parametrize(("save", "causal"), [(save_encoder, False), (save_decoder, True)])
def test_encoders_are_judged_by_their_layers_where_they_have_no_weights(save, causal, tmp_path):
    model = AutoModel.from_pretrained(save(tmp_path)).to("meta")
    refused = pytest.raises(ConfigError, match="attention is causal")
    with refused if causal else nullcontext():
        check_bidirectional("model.encoder", model, tmp_path)


@pytest.mark.parametrize(
    ("capability", "kernel"), [((8, 0), "FlashAttention 2"), ((9, 0), "FlashAttention 2 (")]
)
def test_a_gpu_settles_on_its_kernel(capability, kernel, monkeypatch):
    monkeypatch.setattr(varlen, "_why_not_flash_3", lambda _: "none here")
    with pretended_gpu(monkeypatch, capability):
        assert varlen.settled_kernel.__wrapped__(GPU).startswith(kernel)
    assert varlen.settled_kernel.__wrapped__(CPU) == "plain torch"


def test_a_gpu_elsewhere_is_expected_to_compute_bfloat16(monkeypatch):
    assert hardware.auto_precision("cuda").dtype == "bfloat16"
    assert hardware.auto_precision("cpu").dtype == "float32"
    with pretended_gpu(monkeypatch, (7, 5)):
        assert hardware.auto_precision("cuda").dtype == "float32"
