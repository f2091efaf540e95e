"""Training on one GPU: rayembed's step beside sentence-transformers on the same pairs, in one run.

A bi-encoder of BERT's base size with all weights, and one of Mistral-7B's size with LoRA 16, both
in bfloat16 with in-batch negatives, AdamW in torch's fused kernel and a bare loop: no Ray, no
DeepSpeed, no trainer. sentence-transformers runs with padded SDPA and, where flash-attn or
`flash_shim/` is found, without padding. First the vectors of all sides are compared with those in
float32, or of models that `--check` leaves out with those of the side that ran first.

The share of peak is of operations that count (without recomputing, without padding) over what
square products reach on the same device. What `predictions` and `roofline` expect stands beside it.
Run: python -m benchmarks.gpu.training [--toy] [--models bert 7b nvembed] [--sides auto compiled]
     [--budget 8192 65536] [--steps 8] [--check bert] [--profile auto] [--folder DIR]
"""

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu import made_up, peers, predictions
from benchmarks.gpu.measuring import (
    Table,
    arguments,
    compare,
    device_of,
    gpu_name,
    machine_line,
    mixed,
    peak_gb,
    print_table,
    product_flops,
    reset_peak,
    tokens_of,
)
from benchmarks.gpu.training_sides import SIDES, Case, Side, cases, ours, peer, settings_of, sides

WARMUP = 2
SIDES_PREDICTED = ("auto", "compiled")
"""Sides of which the roofline tells what to expect, at the published size also with `--toy`."""


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


def print_kernels(name: str, side: Side, rows: list[list[str]], device: torch.device) -> None:
    """Where a step's time goes on the device: its kernels by the time they take."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    prepared = side.prepare(rows)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as profiled:
        began = time.perf_counter()
        side.step(prepared)
        launched = time.perf_counter() - began
        if gpu:
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    where = DeviceType.CUDA if gpu else DeviceType.CPU
    kernels = [e for e in profiled.key_averages() if e.device_type == where]

    def seconds(event: Any) -> float:
        return float(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e6

    busy, calls = sum(map(seconds, kernels)), sum(e.count for e in kernels)
    print(
        f"\n{name}: a step under the profiler {taken:.3f} s, of these the host was done after "
        f"{launched:.3f} s; {calls:,} kernels {busy:.3f} s\n"
    )
    print_table(
        ["kernel", "calls", "ms", "share"],
        [
            [
                e.key[:90].replace("|", "/"),
                e.count,
                f"{1e3 * seconds(e):.1f}",
                f"{seconds(e) / busy:.1%}",
            ]
            for e in sorted(kernels, key=seconds, reverse=True)[:14]
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


def predicted_cells(
    case: Case,
    folder: Path,
    side: tuple[str, str],
    columns: list[list[int]],
    device: torch.device,
    peak: float,
) -> list[str]:
    """Tokens/s, share and GB that are predicted for a step of texts with these lengths."""
    key, name = side
    gpu = predictions.gpu_of(gpu_name(device))
    if key in SIDES_PREDICTED:
        return predictions.of_training(
            case.key, key, gpu, case.micro_batch_tokens, peak, folder
        ).cells()
    if key != "peer":
        return predictions.UNKNOWN
    settings = settings_of(case, folder, "bfloat16")
    model = predictions.Model(settings, predictions.MACHINES[gpu], folder)
    padded = name == peers.PADDED
    passes = predictions.of_columns(columns, padded=padded)
    tokens = sum(map(sum, columns))
    return model.training_step(
        passes, tokens=tokens, padded=padded, recomputed=case.lora, peak=peak
    ).cells()


def measure(
    case: Case,
    folder: Path,
    device: torch.device,
    dtype: str,
    peak: float,
    table: Table,
    options: Any,
    chosen_sides: Sequence[str],
) -> None:
    """Add the rows of one case to the table, each after a check of its vectors."""
    from rayembed_extras.estimates.requirements import flops_per_token

    vocabulary = int(case.shape["vocab_size"])
    size = case.pairs
    steps = options.steps or (2 if device.type == "cpu" else 10)
    chosen = made_up.pairs((WARMUP + steps) * size, vocabulary, longest=case.longest)
    texts = made_up.documents(8, vocabulary, longest=case.longest, seed=1)
    exact = options.check is None or case.key in options.check
    kept = folder / f"compared-{case.kind}-{exact}.npy"
    if exact and not kept.exists():
        np.save(kept, exact_vectors(case, folder, device, texts))
        freed(device)
    a_pair = tokens_of(folder, [t for pair in chosen for t in pair]) / len(chosen)
    columns = [[len(t.split()) + 2 for t in column] for column in zip(*chosen[:size], strict=True)]
    # A forward pass, the gradients of what goes through the layers, and those of trained weights.
    factor = 2 if case.lora else 3
    of_token = factor * (flops_per_token(settings_of(case, folder, dtype)) or 0.0)
    # bfloat16 may turn the vectors of a deep model with random weights by some degrees.
    least = 0.98 if dtype == "bfloat16" else 0.9999
    for key, name, make, more in sides(case, options.toy, chosen_sides):
        budget = "all" if key == "peer" else f"{case.micro_batch_tokens:,}"
        about = [case.name, name, budget]
        expected = predicted_cells(case, folder, (key, name), columns, device, peak)
        try:
            side = make(case, folder, device, dtype, **more)
            compare(name, side.vectors(texts), kept, least, exact=exact)
            speed = rate(side, chosen, size, device)
            memory = peak_gb(device)
            numbers = [f"{speed * a_pair:,.0f}", f"{speed * a_pair * of_token / peak:.1%}", memory]
            table.add([*about, f"{speed:.1f}", *mixed(numbers, expected)])
            if key in options.profile:
                print_kernels(f"{case.name}, {name}", side, chosen[:size], device)
        except torch.cuda.OutOfMemoryError:
            table.add([*about, "out of memory", *mixed(["", "", ""], expected)])
        print("measured:", *table.rows[-1][1:], flush=True)
        side = None
        freed(device)


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*cases(True)], default=[*cases(True)])
    parser.add_argument("--budget", type=int, nargs="+", help="tokens of a pass, of rayembed")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument(
        "--check",
        nargs="*",
        choices=[*cases(True)],
        help="models that are compared with float32; default: all. Others are compared with the "
        "side that ran first, in this folder",
    )
    parser.add_argument(
        "--profile", nargs="*", choices=SIDES, default=[], help="sides whose kernels are listed"
    )
    parser.add_argument("--steps", type=int, default=None, help="that count")
    parser.add_argument("--folder", type=Path, help="where models are kept (7B: 15 GB)")
    options = parser.parse_args(given)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rayembed").setLevel(logging.INFO)
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    peak = product_flops(device, getattr(torch, dtype), 256 if device.type == "cpu" else 8192)
    gpu = predictions.gpu_of(gpu_name(device))
    machine_says = f"{machine_line(device)}; square products {peak / 1e12:.3g} TFLOP/s in {dtype}"
    print(machine_says, predictions.assumptions(gpu), sep="\n")
    heads = ["model", "side", "tokens of a pass", "pairs/s", "tokens/s", f"predicted, {gpu}"]
    heads += ["share of measured peak", "predicted", "peak GB", "predicted"]
    table = Table(f"Training. {machine_says}.", heads, options.record)
    with made_up.folder_of_models(options.folder) as folder:
        for key in options.models:
            case = cases(options.toy)[key]
            made = made_up.model_folder(folder / case.folder, case.shape, device, dtype)
            freed(device)
            left = options.sides
            for budget in options.budget or [case.micro_batch_tokens]:
                one = replace(case, key=key, micro_batch_tokens=budget)
                measure(one, made, device, dtype, peak, table, options, left)
                left = [side for side in left if side != "peer"]  # which has no budget
    table.print()


if __name__ == "__main__":
    main()
