"""What only a GPU can show: kernels, its own random stream, its memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_values import TOLERANCES, check
from made_up_records import made_up_records
from tiny_models import save_decoder

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.models.adapters import adapter_bits
from rayembed.models.loading.build import build_model
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)

STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 24, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.1},
        "steps": 1,
    },
)


def build(folder, *, dropout=0.0, dtype="float32"):
    config = parse(
        NVEmbedConfig,
        {
            "backbone": {"path": "given", "dtype": dtype},
            "pooling": {
                "kind": "latent_attention",
                "num_latents": 4,
                "num_heads": 2,
                "head_dim": 8,
            },
            "lora": {"rank": 2, "alpha": 4, "dropout": dropout},
            "query_max_length": 32,
            "document_max_length": 32,
        },
    )
    return build_model(config, Path(save_decoder(folder / "backbone")), seed=3)


def gradients(model, device, *, cache):
    model = model.to(device).train()
    model.zero_grad()
    torch.manual_seed(1)
    batch = make_step_batch(0, made_up_records(24), 2, model.tokenizer)
    settings = StepSettings(80, cache, torch.device(device))
    run_step(model, EngineModule(model), lambda loss, last: loss.backward(), batch, STAGE, settings)
    return {n: p.grad.to("cpu", copy=True) for n, p in model.named_parameters() if p.requires_grad}


def largest_difference(left, right):
    return max((left[name] - right[name]).abs().max().item() for name in left)


def test_gradients_on_the_gpu_are_those_of_the_cpu(tmp_path):
    model = build(tmp_path)
    on_cpu = gradients(model, "cpu", cache=True)
    on_gpu = gradients(model, "cuda", cache=True)
    size = max(value.abs().max().item() for value in on_cpu.values())
    assert largest_difference(on_cpu, on_gpu) < 1e-3 * size  # TF32 is off, sums differ in order


def test_dropout_of_the_gpu_is_replayed(tmp_path):
    model = build(tmp_path, dropout=0.5)
    one_graph = gradients(model, "cuda", cache=False)
    cached = gradients(model, "cuda", cache=True)
    size = max(value.abs().max().item() for value in one_graph.values())
    assert largest_difference(one_graph, cached) < 1e-4 * size
    without = gradients(build(tmp_path), "cuda", cache=True)
    assert largest_difference(one_graph, without) > 1e-2 * size, "dropout must matter here"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_adapters_kernels_give_what_torch_does(dtype):
    check(torch.ops.rayembed, DEVICE, 8, [dtype])
    for rank in (1, 16, 40, 130):
        assert adapter_bits._why_not(DEVICE, dtype, rank) is None


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_an_adapter_on_the_gpu_drops_a_share_and_repeats_it(dtype):
    """Its output and gradients are those of the numbers that its bits keep, without a wait."""
    draw = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(shape, generator=draw).to(DEVICE, dtype).requires_grad_()

    x, grad = made(3, 700, 520), made(3, 700, 264)
    weight, down, up = made(264, 520), made(16, 520), made(264, 16)

    def passed(seed):
        torch.cuda.manual_seed(seed)
        out, _, drawn, _ = torch.ops.rayembed.adapted_linear(
            x, weight.detach(), None, down, up, 2.0, 0.1
        )
        return out, drawn, *torch.autograd.grad(out, (x, down, up), grad)

    passed(0)
    torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        first, again, other = passed(1), passed(1), passed(2)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, again))
    kept = adapter_bits.unpacked(first[1], 520)
    both = kept & adapter_bits.unpacked(other[1], 520)
    number = kept.numel()
    for found, share in ((kept, 0.9), (both, 0.81)):
        spread = (share * (1 - share) / number) ** 0.5
        assert abs(float(found.double().mean()) - share) < 5 * spread + 2**-16
    keep = adapter_bits.share_kept(0.1)
    wide = [one.detach().double().requires_grad_() for one in (x, down, up)]
    dropped = wide[0] * kept.view(x.shape) / keep
    out = wide[0] @ weight.double().t() + 2 * (dropped @ wide[1].t()) @ wide[2].t()
    expected = [out, *torch.autograd.grad(out, wide, grad.double())]
    for found, right in zip((first[0], *first[2:]), expected, strict=True):
        apart = (found.double() - right).detach().norm() / right.detach().norm()
        assert float(apart) < TOLERANCES[dtype]


def test_bf16_vectors_on_the_gpu_are_close_to_fp32_on_the_cpu(tmp_path):
    texts = [record.query for record in made_up_records(40)]
    expected = encode(build(tmp_path).eval(), texts, role="query")
    found = encode(build(tmp_path, dtype="bfloat16").to("cuda").eval(), texts, role="query")
    assert (expected * found).sum(1).min() > 0.999
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-2


def test_the_cache_needs_less_memory_than_one_graph(tmp_path):
    model = build(tmp_path)

    def peak(cache):
        torch.cuda.reset_peak_memory_stats()
        gradients(model, "cuda", cache=cache)
        return torch.cuda.max_memory_allocated()

    peak(True)
    assert peak(True) < peak(False)
