"""What share of a GPU's peak BERT base reaches in training, by counts: a step, and a local run.

A step by itself at several sizes of passes, sentence-transformers' passes over the same pairs, and
a local run with what tokenises, DeepSpeed's optimiser, and what neither hides. Counts are made on
torch's meta device; the assumptions are printed (`predictions`). It is no measurement; where a GPU
is at hand `training.py` and `whole_job.py --runtime local` give one.
Run: python -m benchmarks.gpu.local_run [--gpu H100] [--pairs 256]
"""

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.gpu.measuring import print_table
from benchmarks.gpu.predictions import (
    BETWEEN_STEPS_SECONDS,
    JOB_OPTIMISER_BYTES,
    MACHINES,
    READER_TOKENS,
    READERS,
    SLOW_HOST,
    SQUARE_PRODUCTS,
    THREAD_TOKENS,
    Model,
    Prediction,
    assumptions,
    cut,
    lengths_of_pairs,
    of_columns,
)
from benchmarks.gpu.roofline import SPARE_BYTES


def bert_base() -> Any:
    """Settings of BERT base in bfloat16 without dropout."""
    from benchmarks.gpu.made_up import BERT_BASE

    from rayembed.models.biencoder.config import BiEncoderConfig

    return BiEncoderConfig(
        backbone={
            "path": BERT_BASE,
            "dtype": "bfloat16",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    )


def budget_of(model: Model) -> int:
    """Tokens of a pass that a run on one GPU chooses by its memory."""
    from rayembed.machine.hardware import packed_tokens
    from rayembed.training.memory.graph_room import _SHARES

    size = model.size
    # Weights in bfloat16, gradients, weights and two states in float32.
    taken = SPARE_BYTES + 2 * size.parameters + 16 * size.trained
    return packed_tokens(_SHARES["cuda"] * (model.machine.gpu_bytes - taken), size.graph)


def local_run(
    model: Model,
    pairs: int,
    budget: int | None = None,
    *,
    readers: float,
    compiled: bool = False,
    peak: float = SQUARE_PRODUCTS,
) -> Prediction:
    """A step of a local run on one GPU, over pairs with the lengths of retrieval data.

    Args:
        budget: tokens of a pass; None: by memory.
        readers: tokens a second of all threads or processes that tokenise.
    """
    lengths = [length for column in lengths_of_pairs(pairs) for length in column]
    return model.training_step(
        cut(lengths, budget or budget_of(model)),
        compiled=compiled,
        peak=peak,
        optimiser_bytes=JOB_OPTIMISER_BYTES,
        readers=readers,
        between=BETWEEN_STEPS_SECONDS,
    )


PAIRS = 256
BUDGETS = (8_192, 16_384, 32_768, 65_536)


def rows_of(model: Model, pairs: int) -> list[tuple[str, int, int, Prediction]]:
    """Name, pairs, tokens of a pass, and a step: alone, of the other side, and of local runs."""
    columns = lengths_of_pairs(pairs)
    lengths = [length for column in columns for length in column]
    rows = [
        ("step", pairs, budget, model.training_step(cut(lengths, budget))) for budget in BUDGETS
    ]
    found = model.training_step(cut(lengths, BUDGETS[-1]), compiled=True)
    rows.append(("step, layers compiled", pairs, BUDGETS[-1], found))
    for name, padded in (("padded", True), ("unpadded", False)):
        passes = of_columns(columns, padded=padded)
        found = model.training_step(passes, tokens=sum(lengths), padded=padded)
        most = max(map(sum, passes))
        rows.append((f"sentence-transformers, {name}", pairs, most, found))
    found = local_run(model, pairs, BUDGETS[0], readers=THREAD_TOKENS)
    rows.append(("local run, a thread tokenises", pairs, BUDGETS[0], found))
    rate, budget = READERS * READER_TOKENS, budget_of(model)
    for many, compiled in ((1, False), (2, False), (1, True), (2, True)):
        found = local_run(model, many * pairs, readers=rate, compiled=compiled)
        name = "local run, layers compiled" if compiled else "local run, four processes tokenise"
        rows.append((name, many * pairs, budget, found))
    return rows


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", choices=MACHINES, default="H100")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of a step")
    options = parser.parse_args(given)
    machine = MACHINES[options.gpu]
    model = Model(bert_base(), machine)
    slow = Model(bert_base(), replace(machine, kernel_seconds=SLOW_HOST))
    tokens = sum(map(sum, lengths_of_pairs(options.pairs)))
    print(assumptions(options.gpu))
    size = model.size
    whole = model.costs(gradient=True).of(
        [n for column in lengths_of_pairs(options.pairs) for n in column]
    )
    print(
        f"\nBERT base, all weights, {options.pairs} pairs = {tokens:,} tokens a step. Counted: "
        f"{size.parameters / 1e6:.0f}M parameters, {3 * model.forward_flops() / 1e9:.3f} GFLOP a "
        f"token that count, {whole.product_flops / tokens / 1e9:.3f} of them products (weights of "
        f"positions and of the pooler make none), {whole.bytes / tokens / 1e6:.2f} MB a token of "
        f"element-wise work ({whole.fused_bytes / tokens / 1e6:.2f} fused), "
        f"{size.graph / 1e6:.2f} MB a token of graph, {whole.kernels:.0f} kernels a pass.\n"
    )
    rows: list[list[object]] = []
    for (name, pairs, budget, found), (*_, slower) in zip(
        rows_of(model, options.pairs), rows_of(slow, options.pairs), strict=True
    ):
        speed, share, memory = found.cells()
        assert found.share is not None
        of_sheet = f"{found.share * SQUARE_PRODUCTS / machine.peak:.0%}"
        about = [name, pairs, f"{budget:,}", found.passes, found.bound]
        rows.append([*about, speed, share, of_sheet, slower.cells()[1], memory])
    heads = ["BERT base", "pairs", "tokens of a pass", "passes", "bound by", "tokens/s", "share"]
    slowest = f"share, {1e6 * SLOW_HOST[0]:.0f} µs a kernel"
    print_table([*heads, "of the data sheet", slowest, "GB"], rows)


if __name__ == "__main__":
    main()
