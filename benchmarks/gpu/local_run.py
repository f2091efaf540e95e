"""What share of a GPU's peak BERT base reaches in training, by counts: a step, and a local run.

A step by itself at several sizes of passes, sentence-transformers' passes over the same pairs, and
a local run with what tokenises, DeepSpeed's optimiser, and what neither hides. Counts are made on
torch's meta device; the assumptions are printed (`predictions`). It is no measurement; where a GPU
is at hand `training.py` and `whole_job.py --runtime local` give one.
Run: python -m benchmarks.gpu.local_run [--gpu H100] [--pairs 256]
"""

import argparse
from typing import Any

from benchmarks.gpu.measuring import print_table
from benchmarks.gpu.predictions import (
    BETWEEN_STEPS_SECONDS,
    JOB_OPTIMISER_BYTES,
    MACHINES,
    READER_TOKENS,
    READERS,
    SQUARE_PRODUCTS,
    THREAD_TOKENS,
    Model,
    Prediction,
    assumptions,
    cut,
    lengths_of_pairs,
    of_columns,
)


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


def local_run(
    model: Model,
    pairs: int,
    budget: int,
    *,
    readers: float,
    compiled: bool = False,
    peak: float = SQUARE_PRODUCTS,
) -> Prediction:
    """A step of a local run on one GPU, over pairs with the lengths of retrieval data.

    Args:
        readers: tokens a second of all threads or processes that tokenise.
    """
    lengths = [length for column in lengths_of_pairs(pairs) for length in column]
    return model.training_step(
        cut(lengths, budget),
        compiled=compiled,
        peak=peak,
        optimiser_bytes=JOB_OPTIMISER_BYTES,
        readers=readers,
        between=BETWEEN_STEPS_SECONDS,
    )


PAIRS = 256
BUDGETS = (8_192, 16_384, 32_768, 65_536)


def encoder_rows(model: Model, pairs: int) -> list[list[object]]:
    """Rows of a step by itself at several budgets, of the other side's, and of local runs."""
    columns = lengths_of_pairs(pairs)
    lengths = [length for column in columns for length in column]
    rows: list[list[object]] = []

    def add(name: str, pairs: int, budget: int | str, passes: int, found: Prediction) -> None:
        budget = f"{budget:,}" if isinstance(budget, int) else budget
        rows.append([name, pairs, budget, passes, *_cells(found)])

    for budget in BUDGETS:
        passes = cut(lengths, budget)
        add("step", pairs, budget, len(passes), model.training_step(passes))
    found = model.training_step(passes, compiled=True)
    add("step, layers compiled", pairs, budget, len(passes), found)
    for name, padded in (("padded", True), ("unpadded", False)):
        passes = of_columns(columns, padded=padded)
        found = model.training_step(passes, tokens=sum(lengths), padded=padded)
        add(f"sentence-transformers, {name}", pairs, "all", len(passes), found)
    found = local_run(model, pairs, BUDGETS[0], readers=THREAD_TOKENS)
    add("local run, a thread tokenises", pairs, BUDGETS[0], found.passes, found)
    rate, most = READERS * READER_TOKENS, 2 * BUDGETS[-1]
    for many in (1, 2, 4):
        found = local_run(model, many * pairs, most, readers=rate)
        add(f"local run, {READERS} processes tokenise", many * pairs, most, found.passes, found)
    found = local_run(model, 2 * pairs, most, readers=rate, compiled=True)
    add("local run, layers compiled", 2 * pairs, most, found.passes, found)
    return rows


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", choices=MACHINES, default="H100")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of a step")
    options = parser.parse_args(given)
    model = Model(bert_base(), options.gpu)
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
    heads = ["BERT base", "pairs", "tokens of a pass", "passes", "tokens/s"]
    print_table(
        [*heads, "share", "of the data sheet", "GB", "bound by"], encoder_rows(model, options.pairs)
    )


def _cells(found: Prediction) -> list[str]:
    tokens, share, memory = found.cells()
    assert found.share is not None
    of_sheet = found.share * SQUARE_PRODUCTS / MACHINES["H100"].peak
    return [tokens, share, f"{of_sheet:.0%}", memory, found.bound]


if __name__ == "__main__":
    main()
