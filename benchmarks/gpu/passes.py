"""What a pass costs beside its tokens, and what its graph takes, beside what rayembed reckons with.

Passes of more and more tokens, packed on a GPU, in bfloat16; a line is fitted to their times. Its
constant over its slope is the cost of a pass in tokens, by which micro-batches are cut
(`hardware.pass_cost_tokens`). The memory of a graph is compared with what `graph_room` measures to
decide which graphs fit. First the vectors of such a pass are compared with the encoder's.
Run: python -m benchmarks.gpu.passes [--toy] [--models minilm bert 7b] [--folder DIR]
"""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu import made_up, predictions
from benchmarks.gpu.encoding import cases
from benchmarks.gpu.measuring import (
    Table,
    arguments,
    check,
    device_of,
    gpu_name,
    machine_line,
    mixed,
    reset_peak,
    seconds,
)
from torch.nn import functional

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOY_SIZES = (64, 128, 256)
LONGEST = 512


def passes_of(model: Any, texts: list[str], size: int, device: torch.device) -> Any:
    """A training pass over the first texts of about so many tokens, and their tokens."""
    from rayembed.models.contract import to_device
    from rayembed.models.passes.micro_batches import collate
    from rayembed.training.contrastive.engine_module import EngineModule

    tokens = model.tokenizer(texts[: max(1, size // 8)], "document")
    ends = np.cumsum([len(one["input_ids"]) for one in tokens])
    count = max(1, int(np.searchsorted(ends, size, side="right")))
    batch = to_device(collate(model, tokens, range(count)), device)
    return partial(EngineModule(model), batch, None), int(ends[count - 1])


def settings_of(folder: Path, shape: Any, dtype: str, longest: int) -> Any:
    """Settings of the model, with LoRA for a large one."""
    from rayembed.config.backbone import LoraConfig
    from rayembed.models.biencoder.config import BiEncoderConfig

    return BiEncoderConfig(
        backbone={"path": str(folder), "dtype": dtype},
        lora=LoraConfig() if int(shape["hidden_size"]) > 2000 else None,
        query_max_length=longest,
        document_max_length=longest,
    )


def measure(
    name: str,
    folder: Path,
    shape: Any,
    device: torch.device,
    dtype: str,
    table: Table,
    options: Any,
) -> list[object]:
    """Add the rows of the sizes of one model to the table; its row in the table of costs."""
    from rayembed.machine.hardware import pass_cost_tokens
    from rayembed.models.loading.build import build_model
    from rayembed.models.passes.encoding import encode
    from rayembed.training.memory.graph_room import saved_bytes

    longest = 40 if options.toy else LONGEST
    config = settings_of(folder, shape, dtype, longest)
    model = build_model(config, folder, seed=0).to(device).train()
    texts = made_up.documents(3000, int(shape["vocab_size"]), longest=longest)
    rounds = options.rounds or (1 if options.toy else 5)
    with torch.no_grad():
        forward, _ = passes_of(model, texts, TOY_SIZES[-1], device)
        passed = functional.normalize(forward().embeddings.float(), dim=1).cpu().numpy()
    wanted = encode(model, texts[: len(passed)], role="document")
    least = float((passed * wanted).sum(1).min())
    check(least > 0.98, f"{name}: cosine of a pass to the encoder at least {least:.4f}")
    model.train()
    found: list[tuple[int, float, float]] = []
    gpu = predictions.gpu_of(gpu_name(device))
    counts = predictions.Model(config, predictions.MACHINES[gpu], folder)
    for size in TOY_SIZES if options.toy else SIZES:
        forward, tokens = passes_of(model, texts, size, device)
        expected = [_predicted(counts, tokens, gradient=each) for each in (False, True)]
        with torch.no_grad():
            plain = seconds(forward, device, warmup=2, rounds=rounds)
        counted = saved_bytes(forward, model)
        taken = "–"
        try:
            if device.type == "cuda":
                reset_peak(device)
                before = torch.cuda.memory_allocated(device)
                kept = forward()
                taken = f"{(torch.cuda.memory_allocated(device) - before) / tokens / 1e6:.3g}"
                del kept

            def both(forward: Any = forward) -> None:
                forward().embeddings.float().sum().backward()

            trained = seconds(both, device, warmup=2, rounds=rounds)
        except torch.cuda.OutOfMemoryError:
            times = mixed([f"{1e3 * plain:.1f}", "out of memory"], expected)
            table.add([name, f"{tokens:,}", *times, taken, ""])
            break
        found.append((tokens, plain, trained))
        times = mixed([f"{1e3 * plain:.1f}", f"{1e3 * trained:.1f}"], expected)
        table.add([name, f"{tokens:,}", *times, taken, f"{counted / tokens / 1e6:.3g}"])
        model.zero_grad(set_to_none=True)
    fitted = [_constant_over_slope(found, column) for column in (1, 2)]
    costs: list[object] = [name, *fitted, f"{pass_cost_tokens(device.type, model):,}"]
    del model, forward
    gc.collect()
    reset_peak(device)
    return costs


def _predicted(counts: predictions.Model, tokens: int, *, gradient: bool) -> str:
    """Milliseconds of a pass over texts of 150 tokens, the mean of retrieval data."""
    texts = max(1, round(tokens / 150))
    lengths = [tokens / texts] * texts
    plain, costs = counts.costs(gradient=False), counts.costs(gradient=gradient)
    found = predictions.seconds_of([lengths], costs, counts.machine, plain=plain)
    return f"{1e3 * max(found):.1f}"


def _constant_over_slope(found: list[tuple[int, float, float]], column: int) -> str:
    """Tokens that take as long as a pass does beside its tokens; errors count relative to times."""
    measured = np.array(found)
    tokens, times = measured[:, 0], measured[:, column]
    slope, constant = np.polyfit(tokens, times, 1, w=1 / times)
    return f"{max(0.0, constant / slope):,.0f}"


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*cases(True)], default=[*cases(True)])
    parser.add_argument("--folder", type=Path, help="where models are kept (7B: 15 GB)")
    options = parser.parse_args(given)
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    print(machine_line(device))
    gpu = predictions.gpu_of(gpu_name(device))
    heads = ["model", "tokens", "forward ms", f"predicted, {gpu}", "forward and backward ms"]
    heads += ["predicted", "graph MB a token", "reckoned MB a token"]
    table = Table(f"Passes. {machine_line(device)}.", heads, options.record)
    heads = ["model", "cost of a pass, tokens", "in training", "reckoned with"]
    costs = Table("What a pass costs beside its tokens.", heads, options.record)
    with made_up.folder_of_models(options.folder) as folder:
        found = []
        for key in options.models:
            name, shape, _ = cases(options.toy)[key]
            made = made_up.model_folder(folder / key, shape, device, dtype)
            found.append(measure(name, made, shape, device, dtype, table, options))
        for row in found:
            costs.add(row)
    table.print()
    costs.print()


if __name__ == "__main__":
    main()
