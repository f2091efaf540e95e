"""Training on one GPU: rayembed's step beside sentence-transformers on the same pairs, in one run.

A bi-encoder of BERT's base size with all weights, and one of Mistral-7B's size with LoRA 16, both
in bfloat16 with in-batch negatives, AdamW in torch's fused kernel and a bare loop: no Ray, no
DeepSpeed, no trainer. sentence-transformers runs with padded SDPA and, where flash-attn is
installed, without padding. First the vectors of both are compared with those in float32.

The share of peak is of operations that count (without recomputing, without padding) over what
square products reach on the same device.
Run: python -m benchmarks.gpu.training [--toy] [--models bert 7b nvembed] [--folder DIR]
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu import made_up
from benchmarks.gpu.measuring import (
    arguments,
    check,
    device_of,
    has_flash_attention,
    machine_line,
    peak_gb,
    print_table,
    product_flops,
    reset_peak,
    tokens_of,
)

WARMUP = 2
RATE = 2e-5


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str
    folder: str
    """Of the backbone."""
    kind: str
    """`biencoder`, or `nvembed`, which sentence-transformers does not have."""
    shape: dict[str, Any]
    lora: bool
    pairs: int
    """Of a step."""
    longest: int = 512
    micro_batch_tokens: int = 16_384


def cases(toy: bool) -> dict[str, Case]:
    """Cases by their names on the command line."""
    if toy:
        encoder, decoder = dict(made_up.TOY_ENCODER), dict(made_up.TOY_DECODER)
        return {
            "bert": Case(
                "toy encoder, all weights", "toy-encoder", "biencoder", encoder, False, 6, 40, 128
            ),
            "7b": Case(
                "toy decoder, LoRA 16", "toy-decoder", "biencoder", decoder, True, 4, 40, 128
            ),
            "nvembed": Case(
                "toy NV-Embed, LoRA 16", "toy-decoder", "nvembed", decoder, True, 4, 40, 128
            ),
        }
    encoder = dict(made_up.published_shape(made_up.BERT_BASE))
    decoder = dict(made_up.published_shape(made_up.MISTRAL_7B))
    return {
        "bert": Case("BERT base (110M), all weights", "bert", "biencoder", encoder, False, 256),
        "7b": Case("Mistral-7B, LoRA 16", "7b", "biencoder", decoder, True, 64, 512, 8192),
        "nvembed": Case(
            "NV-Embed (Mistral-7B), LoRA 16", "7b", "nvembed", decoder, True, 64, 512, 8192
        ),
    }


def settings_of(case: Case, folder: Path, dtype: str) -> Any:
    """Settings of rayembed's model."""
    from rayembed.config.lora import LoraConfig
    from rayembed.config.pooling import LatentAttentionPooling
    from rayembed.models.biencoder.config import BiEncoderConfig
    from rayembed.models.nvembed.config import NVEmbedConfig

    backbone = {"path": str(folder), "dtype": dtype}
    lengths = {"query_max_length": case.longest, "document_max_length": case.longest}
    lora = LoraConfig() if case.lora else None
    if case.kind == "biencoder":
        return BiEncoderConfig(backbone=backbone, lora=lora, **lengths)
    pooling = LatentAttentionPooling(num_latents=512, num_heads=8)
    return NVEmbedConfig(backbone=backbone, lora=lora, pooling=pooling, **lengths)


def stage_of(pairs: int) -> Any:
    """Settings of a stage with this many pairs a step."""
    from rayembed.config.stage import BatchConfig, StageConfig
    from rayembed.losses.infonce import InfoNCE
    from rayembed.optim.adamw import AdamW

    return StageConfig(
        name="only",
        datasets={"pairs": 1},
        batch=BatchConfig(global_pairs=pairs, num_negatives=0, in_batch_negatives=True),
        loss=InfoNCE(temperature=0.05),
        optimizer=AdamW(learning_rate=RATE),
        steps=1,
    )


@dataclass(frozen=True)
class Side:
    """One way to train."""

    prepare: Callable[[list[list[str]]], Any]
    """Tokens of a step's pairs on the CPU, which all sides make ahead of the step."""
    step: Callable[[Any], object]
    """Trains on what was prepared; what comes back is thrown away."""
    vectors: Callable[[list[str]], np.ndarray]
    """Unit vectors of documents, float32."""


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, fused=True)


def ours(
    case: Case,
    folder: Path,
    device: torch.device,
    dtype: str,
    *,
    grad_cache: bool | None = None,
    recompute: bool = False,
    compiled: bool = False,
) -> Side:
    """Rayembed's.

    Args:
        grad_cache: None: of graphs and layers is kept what fits, as a run does by itself.
    """
    from rayembed.data.plan.step_batch import make_step_batch
    from rayembed.data.records import Record
    from rayembed.hardware import pass_cost_tokens
    from rayembed.models.build import build_model
    from rayembed.models.encoding import encode
    from rayembed.training.graph_room import GraphRoom
    from rayembed.training.step import EngineModule, StepSettings, collated_step, run_step

    model = build_model(settings_of(case, folder, dtype), folder, seed=0).to(device)
    if recompute:
        model.recompute_layers()
    if compiled:
        model.compile_layers()
    optimizer, passable, stage = optimizer_of(model), EngineModule(model), stage_of(case.pairs)
    settings = StepSettings(
        case.micro_batch_tokens,
        GraphRoom(device, model) if grad_cache is None else grad_cache,
        device,
        pass_cost_tokens=pass_cost_tokens(device.type, model),
    )

    def prepare(rows: list[list[str]]) -> Any:
        records = [Record(str(i), q, (d,), "pairs") for i, (q, d) in enumerate(rows)]
        batch = make_step_batch(0, records, 0, model.tokenizer)
        return collated_step(model, batch, stage, settings)

    def step(prepared: Any) -> None:
        run_step(model, passable, lambda loss, _: loss.backward(), prepared, stage, settings)
        optimizer.step()
        optimizer.zero_grad()

    return Side(prepare, step, lambda texts: encode(model, texts, role="document"))


def peer(
    case: Case, folder: Path, device: torch.device, dtype: str, *, attention: str, recompute: bool
) -> Side:
    """The same in sentence-transformers' modules and loss; forward passes in one micro-batch."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(
        str(folder),
        device=str(device),
        model_kwargs={"attn_implementation": attention, "dtype": getattr(torch, dtype)},
    )
    model.max_seq_length = case.longest
    transformer = model[0].auto_model
    if case.lora:
        import peft

        from rayembed.config.lora import LoraConfig

        lora = LoraConfig()
        transformer.add_adapter(
            peft.LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(lora.target_modules),
            )
        )
    if recompute:
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of = MultipleNegativesRankingLoss(model, scale=20.0)
    optimizer = optimizer_of(model)
    model.train()

    def prepare(rows: list[list[str]]) -> list[Any]:
        columns = (list(column) for column in zip(*rows, strict=True))
        return [model.preprocess(column) for column in columns]

    def step(features: list[Any]) -> None:
        moved = [
            {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in one.items()}
            for one in features
        ]
        loss_of(moved, torch.empty(0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def vectors(texts: list[str]) -> np.ndarray:
        model.eval()
        found = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        model.train()
        return np.asarray(found, dtype=np.float32)

    return Side(prepare, step, vectors)


SIDES = ("auto", "compiled", "graph", "cache", "peer")
"""Sides by their names on the command line."""


def sides(
    case: Case, recompute: bool, chosen: Sequence[str]
) -> Iterator[tuple[str, Callable, dict[str, Any]]]:
    """Name, what makes its step, and further arguments."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "auto": ("as it comes", {}),
        "compiled": ("layers compiled", {"compiled": True}),
        "graph": ("one graph", {"grad_cache": False, "recompute": recompute}),
        "cache": ("GradCache", {"grad_cache": True, "recompute": recompute}),
    }
    for key, (name, more) in found.items():
        if key in chosen:
            yield f"rayembed, {name}", ours, more
    if case.kind == "biencoder" and "peer" in chosen:
        name = "sentence-transformers"
        yield f"{name}, SDPA", peer, {"attention": "sdpa", "recompute": recompute}
        if has_flash_attention():
            flash = {"attention": "flash_attention_2", "recompute": recompute}
            yield f"{name}, flash-attn, unpadded", peer, flash


def rate(side: Side, chosen: list[list[str]], size: int, device: torch.device) -> float:
    """Pairs a second, without the first steps."""
    ready = [side.prepare(chosen[place : place + size]) for place in range(0, len(chosen), size)]
    for number, prepared in enumerate(ready):
        if number == WARMUP:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
        side.step(prepared)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (len(chosen) - WARMUP * size) / (time.perf_counter() - began)


def print_kernels(name: str, side: Side, rows: list[list[str]]) -> None:
    """Where a step's time goes on the GPU: its kernels by the time they take."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    prepared = side.prepare(rows)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        began = time.perf_counter()
        side.step(prepared)
        torch.cuda.synchronize()
        taken = time.perf_counter() - began
    kernels = [e for e in profiled.key_averages() if e.device_type == DeviceType.CUDA]
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    most = sorted(kernels, key=lambda e: -e.self_device_time_total)[:14]
    print(f"\n{name}: a step under the profiler {taken:.3f} s, kernels {busy:.3f} s\n")
    print_table(
        ["kernel", "calls", "ms", "share"],
        [
            [
                e.key[:90].replace("|", "/"),
                e.count,
                f"{e.self_device_time_total / 1e3:.1f}",
                f"{e.self_device_time_total / 1e6 / busy:.1%}",
            ]
            for e in most
        ],
    )
    print()


def freed(device: torch.device) -> None:
    gc.collect()
    reset_peak(device)


def exact_vectors(case: Case, folder: Path, device: torch.device, texts: list[str]) -> np.ndarray:
    """Vectors in float32: of sentence-transformers where it has the architecture."""
    if case.kind == "biencoder":
        made = peer(case, folder, device, "float32", attention="sdpa", recompute=False)
    else:
        made = ours(case, folder, device, "float32", grad_cache=False, recompute=False)
    return made.vectors(texts)


def rows_of(
    case: Case,
    folder: Path,
    device: torch.device,
    dtype: str,
    steps: int,
    peak: float,
    wanted: Sequence[str],
    profiled: Sequence[str],
) -> list[list[object]]:
    """Rows of the table of one case, after a check of its vectors."""
    from rayembed.pipeline.requirements import flops_per_token

    vocabulary = int(case.shape["vocab_size"])
    size = case.pairs
    chosen = made_up.pairs((WARMUP + steps) * size, vocabulary, longest=case.longest)
    texts = [document for _, document in chosen[:8]]
    reference = exact_vectors(case, folder, device, texts)
    freed(device)
    a_pair = tokens_of(folder, [t for pair in chosen for t in pair]) / len(chosen)
    # A forward pass, the gradients of what goes through the layers, and those of trained weights.
    factor = 2 if case.lora else 3
    of_token = factor * (flops_per_token(settings_of(case, folder, dtype)) or 0.0)
    recompute = case.lora
    found = []
    for name, make, more in sides(case, recompute, wanted):
        try:
            side = make(case, folder, device, dtype, **more)
            least = float((side.vectors(texts) * reference).sum(1).min())
            # bfloat16 may turn the vectors of a deep model with random weights by some degrees.
            needed = 0.98 if dtype == "bfloat16" else 0.9999
            check(least > needed, f"{name}: cosine to float32 at least {least:.4f}")
            speed = rate(side, chosen, size, device)
            memory = peak_gb(device)
            if any(name.endswith(one) for one in profiled):
                print_kernels(f"{case.name}, {name}", side, chosen[:size])
        except torch.cuda.OutOfMemoryError:
            found.append([case.name, name, "out of memory", "", "", ""])
        else:
            share = speed * a_pair * of_token / peak
            numbers = [f"{speed:.1f}", f"{speed * a_pair:,.0f}", f"{share:.1%}", memory]
            found.append([case.name, name, *numbers])
        print("measured:", *found[-1][1:], flush=True)
        side = None
        freed(device)
    return found


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*cases(True)], default=[*cases(True)])
    parser.add_argument("--budget", type=int, help="tokens of a pass, of rayembed")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="default: all")
    parser.add_argument(
        "--profile",
        nargs="*",
        default=[],
        help="sides whose kernels are listed, by the ends of their names",
    )
    parser.add_argument("--steps", type=int, default=None, help="that count")
    parser.add_argument("--folder", type=Path, help="where models are kept (7B: 15 GB)")
    options = parser.parse_args(given)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rayembed").setLevel(logging.INFO)
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    small = device.type == "cpu"
    peak = product_flops(device, getattr(torch, dtype), 256 if small else 8192)
    print(machine_line(device), f"\nsquare products: {peak / 1e12:.3g} TFLOP/s in {dtype}")
    # On a CPU a compiler would first work for minutes.
    chosen = options.sides or [side for side in SIDES if side != "compiled" or not small]
    profiled = [name for name in options.profile if device.type == "cuda"]
    steps = options.steps or (2 if small else 10)
    rows = []
    with made_up.folder_of_models(options.folder) as folder:
        for key in options.models:
            case = cases(options.toy)[key]
            if options.budget:
                case = replace(case, micro_batch_tokens=options.budget)
            made = made_up.model_folder(folder / case.folder, case.shape, device, dtype)
            freed(device)
            rows += rows_of(case, made, device, dtype, steps, peak, chosen, profiled)
    print()
    heads = ["model", "side", "pairs/s", "tokens/s", "share of measured peak", "peak GB"]
    print_table(heads, rows)


if __name__ == "__main__":
    main()
