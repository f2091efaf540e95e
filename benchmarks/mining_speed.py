"""The whole mining step against sentence-transformers' `mine_hard_negatives`, in one run.

Descriptions of the Wikipedia sample and their texts, all-MiniLM-L6-v2 as the teacher of both, the
same length, rule (a negative scores at most 95 % of the positive), depth and number. Both have
their model loaded when the clock starts. Ours encodes in the number type that this CPU computes
fast, theirs in its default, float32; negatives that are not the same are told with how far apart
they score for the float32 model. The last table is how near each side is to what the products of
the teacher's layers alone would take here: nothing in that number type can be faster.
Run: python benchmarks/mining_speed.py --pairs 800
"""

import argparse
import itertools
import tempfile
import time
from collections import defaultdict

import numpy as np
import torch

NUM_NEGATIVES, DEPTH, MARGIN = 7, 100, 0.05


def wikipedia_pairs(count, folder, max_length):
    """Pipeline context, data set settings and records, made before the clock starts."""
    from rayembed.config.data import DataConfig, DatasetConfig
    from rayembed.config.data_run import DataRun
    from rayembed.config.mining import MiningConfig
    from rayembed.data.engine.artifacts import PipelineContext
    from rayembed.data.mining.rules import PercPos
    from rayembed.data.prepare import prepare_datasets
    from rayembed.recipes.sample import MINILM, Wikipedia

    mining = MiningConfig(
        teacher=MINILM,
        max_length=max_length,
        rule=PercPos(max_relative_score=1 - MARGIN),
        num_negatives=NUM_NEGATIVES,
        candidates=DEPTH,
        near_duplicate=None,
    )
    dataset = DatasetConfig(
        name="wiki-description",
        source=Wikipedia().pairs("description"),
        num_samples=count,
        mining=mining,
    )
    data = DataConfig(datasets=(dataset,))
    run = DataRun(name="speed", data=data)
    pipeline_context = PipelineContext(folder, 0)
    before = prepare_datasets(run, pipeline_context, until="records")["wiki-description"][-1]
    return pipeline_context, dataset, before


def ours(pipeline_context, dataset, before):
    """Seconds, and (query, positive) → negatives with their scores."""
    from rayembed.data.engine.parts import read_records
    from rayembed.data.mining.mine import make_mined
    from rayembed.data.sources.tasks import HeldOut
    from rayembed.data.vectors.teacher import load_teacher, weights_of

    load_teacher(dataset.mining, weights_of(dataset.mining.teacher))
    began = time.perf_counter()
    # No corpus of its own: what is held out is out of the records.
    mined = make_mined(pipeline_context, dataset, before, HeldOut())
    seconds = time.perf_counter() - began
    records = [record for part in mined.parts for record in read_records(part.path)]
    return seconds, {(r.query, r.positives[0]): [n.text for n in r.negatives] for r in records}


def theirs(pairs, model):
    """As `ours`; the positives that a query has in several rows count as one row's there too."""
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    queries, positives = zip(*pairs, strict=True)
    dataset = Dataset.from_dict({"query": list(queries), "positive": list(positives)})
    most = max(np.unique(queries, return_counts=True)[1])
    began = time.perf_counter()
    mined = mine_hard_negatives(
        dataset,
        model,
        relative_margin=MARGIN,
        # It looks at so many more, of which the positives are taken out.
        range_max=DEPTH - int(most),
        num_negatives=NUM_NEGATIVES,
        output_format="labeled-list",
        verbose=False,
    )
    seconds = time.perf_counter() - began
    found = dict.fromkeys(pairs, ())
    for query, texts in zip(mined["query"], mined["positive"], strict=True):
        found[query, texts[0]] = texts[1:]
    return seconds, found


def gaps(mine, yours, model):
    """How far apart exchanged negatives score, by the float32 model: one number an exchange.

    An exchange is of the two at the edge of the list, or of one at the rule's limit with whatever
    comes in at the edge for it; the nearest of these counts.
    """
    found = []
    positives = defaultdict(list)
    for query, positive in mine:
        positives[query].append(positive)
    for pair in mine:
        sides = [set(mine[pair]) - set(yours[pair]), set(yours[pair]) - set(mine[pair])]
        if not any(sides):
            continue
        texts = [pair[0], *positives[pair[0]], *sides[0], *sides[1]]
        vectors = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        score = dict(zip(texts, (vectors @ vectors[0]).tolist(), strict=True))
        limit = (1 - MARGIN) * min(score[text] for text in positives[pair[0]])
        ordered = [sorted((score[text] for text in side), reverse=True) for side in sides]
        for one, other in itertools.zip_longest(*ordered, fillvalue=np.inf):
            found.append(min(abs(one - other), abs(one - limit), abs(other - limit)))
    return np.array(found)


def least_seconds(texts, model, dtype):
    """Seconds of the teacher's products over these texts without padding, at the best rate that
    products of its layers' sizes reach here, and that rate in FLOP/s."""
    config = model[0].auto_model.config
    width, inner = config.hidden_size, config.intermediate_size
    lengths = np.array(
        [
            len(ids)
            for ids in model.tokenizer(
                texts, truncation=True, max_length=model.max_seq_length
            ).input_ids
        ]
    )
    weights = 4 * width * width + 2 * width * inner
    flops = config.num_hidden_layers * (
        2 * weights * lengths.sum() + 4 * width * (lengths.astype(np.int64) ** 2).sum()
    )
    rate = max(product_rate(*sizes, dtype) for sizes in ((width, inner), (inner, width)))
    return flops / rate, rate


def product_rate(inner, columns, dtype, rows=4096, repeats=20):
    """FLOP/s of the fastest of some products of tokens by a layer's weights."""
    linear = torch.nn.Linear(inner, columns, bias=False, dtype=dtype)
    tokens = torch.randn(rows, inner, dtype=dtype)
    took = []
    with torch.inference_mode():
        for _ in range(repeats):
            began = time.perf_counter()
            linear(tokens)
            took.append(time.perf_counter() - began)
    return 2 * rows * inner * columns / min(took)


def shares(mine, best, model, precision):
    """A table: seconds that a side's products take at least, and their share of all its own."""
    lines = ["| side | TFLOP/s of its products | seconds they take at least | of the side's |"]
    lines.append("|---|---:|---:|---:|")
    queries, positives = (sorted(set(texts)) for texts in zip(*mine, strict=True))
    for side, dtype in (
        ("sentence-transformers", torch.float32),
        ("rayembed", getattr(torch, precision.dtype)),
    ):
        seconds, rate = least_seconds([*queries, *positives], model, dtype)
        lines.append(f"| {side} | {rate / 1e12:.2f} | {seconds:.1f} | {seconds / best[side]:.0%} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=None, help="all when left out")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    from rayembed.assets.resolver import resolve_model
    from rayembed.machine.hardware import auto_precision
    from rayembed.recipes.sample import MINILM
    from rayembed.registry.provenance import cpu_summary

    model = SentenceTransformer(str(resolve_model(MINILM)), device="cpu")
    model.max_seq_length = args.max_length
    seconds = {"sentence-transformers": [], "rayembed": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            step = wikipedia_pairs(args.pairs, folder, args.max_length)
            took, mine = ours(*step)
        seconds["rayembed"].append(took)
        print(f"rayembed: {took:.1f} s", flush=True)
        took, yours = theirs(list(mine), model)
        seconds["sentence-transformers"].append(took)
        print(f"sentence-transformers: {took:.1f} s", flush=True)
    same = sum(len(set(mine[pair]) & set(yours[pair])) for pair in mine)
    total = sum(len(set(negatives)) for negatives in yours.values())
    apart = gaps(mine, yours, model)
    best = {side: min(times) for side, times in seconds.items()}
    print(f"{cpu_summary()}, ours in {auto_precision('cpu')}")
    print(f"{len(mine):,} pairs\n| side | seconds (best) | ratio |\n|---|---|---|")
    for side, value in best.items():
        print(f"| {side} | {value:.1f} | {best['sentence-transformers'] / value:.2f} |")
    print(f"negatives the same: {same:,} of {total:,}, {same / total:.2%}")
    if len(apart):
        print(
            f"the others score {np.median(apart):.1e} apart (median), at most {apart.max():.1e}, "
            "for the float32 model"
        )
    print(shares(mine, best, model, auto_precision("cpu")))


if __name__ == "__main__":
    main()
