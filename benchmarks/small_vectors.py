"""What small vectors keep of a search's quality, with and without training for them.

all-MiniLM-L6-v2, of which the first layers are taken, learns Wikipedia's pairs (one sentence → the
rest of its article) with Matryoshka at 256 of its 384 dimensions; further arms score int8 and
binary vectors in training too, and have the spread-out regulariser. Articles are held out, whose
rests are the corpus and whose sentences the queries. Printed are nDCG@10 of the same model by the
number type of its vectors, mean and standard deviation over seeds, the share that is kept of its
score with all dimensions in float32, and the bytes of a stored document.

    python benchmarks/small_vectors.py --seeds 0 1 2
"""

import argparse
import json
import random
import statistics
import tempfile
import time

ARMS = {
    "Matryoshka": {},
    "+ int8, binary": {"precisions": ("int8", "binary")},
    "+ int8, binary, spread-out": {"precisions": ("int8", "binary"), "spread_out": 1.0},
}
WIDTH = 256
AGAIN = {"precision": "int8", "candidates": 40}
STORED = {
    "float32, 384": {},
    "float32, 256": {"dimensions": WIDTH},
    "int8, 256": {"dimensions": WIDTH, "precision": "int8"},
    "binary, 256": {"dimensions": WIDTH, "precision": "binary"},
    "binary, 256, 40 rescored by int8": {
        "dimensions": WIDTH,
        "precision": "binary",
        "rescore": AGAIN,
    },
}


def bytes_a_document(stored):
    width = stored.get("dimensions", 384)
    kinds = [stored.get("precision", "float32")]
    kinds += [stored["rescore"]["precision"]] if "rescore" in stored else []
    return sum(
        {"float32": 4 * width, "int8": width, "binary": -(-width // 8)}[kind] for kind in kinds
    )


def parts(given):
    """Pairs to train on, and a set of held-out ones."""
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    lines = resolve(Wikipedia(held_out=0).pairs("sentence").path).read_text().splitlines()
    rows = [(row["query"], row["positive"]) for row in map(json.loads, lines)]
    random.Random(0).shuffle(rows)
    held_out = rows[: given.documents]
    return rows[given.documents :][: given.pairs], {
        "corpus": {f"d{i}": text for i, (_, text) in enumerate(held_out)},
        "queries": {f"q{i}": text for i, (text, _) in enumerate(held_out[: given.queries])},
        "qrels": {f"q{i}": {f"d{i}": 1} for i in range(given.queries)},
    }


def trained(rows, loss, seed, given, output):
    import rayembed
    from rayembed.losses.infonce import InfoNCE
    from rayembed.recipes.sample import MINILM

    return rayembed.train(
        MINILM,
        rows,
        loss=InfoNCE(temperature=0.05, dimensions=(WIDTH,), **loss),
        steps=given.steps,
        batch_size=given.batch,
        learning_rate=given.learning_rate,
        output=output,
        settings={
            "seed": seed,
            "model.backbone.num_layers": given.layers,
            "model.query_max_length": given.length,
            "model.document_max_length": given.length,
            "data.datasets.pairs.held_out": None,
            "evaluation.guard": None,
            "evaluation.benchmarks": [],
            "evaluation.baselines": [],
            "placement.threads_per_worker": given.threads,
        },
    )


def scores(model, held_out, given, output):
    """nDCG@10 by how vectors are stored."""
    import rayembed

    found = {}
    for name, stored in STORED.items():
        settings = {f"model.{key}": value for key, value in stored.items()}
        settings["placement.threads_per_worker"] = given.threads
        (found[name],) = rayembed.evaluate(
            model, held_out, output=output, settings=settings
        ).values()
    return found


def table(found):
    """Scores by arm and number type, and the share of the arm's own float score."""
    lines = [
        "| vectors | bytes | " + " | ".join(found) + " |",
        "| --- | ---: |" + " ---: |" * len(found),
    ]
    for name, stored in STORED.items():
        cells = []
        for seeds in found.values():
            values = [of[name] for of in seeds]
            kept = statistics.mean(of[name] / of["float32, 384"] for of in seeds)
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.4f}{spread} ({kept:.1%})")
        lines.append(f"| {name} | {bytes_a_document(stored)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    rows, held_out = parts(given)
    found = {arm: [] for arm in given.arms}
    with tempfile.TemporaryDirectory() as output:
        for seed in given.seeds:
            for arm in given.arms:
                began, cpu = time.monotonic(), time.process_time()
                model = trained(rows, ARMS[arm], seed, given, f"{output}/{seed}")
                found[arm].append(scores(model, held_out, given, f"{output}/{seed}"))
                told = ", ".join(f"{value:.4f}" for value in found[arm][-1].values())
                took = f"{time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} CPU-s"
                print(f"{arm}, seed {seed}: {told}; {took}", flush=True)
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
