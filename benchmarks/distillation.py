"""Quality of a small student that learns a teacher's stored scores, beside InfoNCE alone.

The student is the first layers of all-MiniLM-L6-v2, the teacher the whole model, the pairs are
Wikipedia's (one sentence → the rest of its article), a part of which is held out and scored. All
arms have the same mined negatives, batches and steps; they differ by their loss alone. Printed are
nDCG@10 of each seed, and differences to InfoNCE by seed with the half-width of their 95 % interval.

    python benchmarks/distillation.py --seeds 0 1 2
"""

import argparse
import json
import random
import statistics
import tempfile
import time

ARMS = {
    "infonce": {"kind": "infonce", "temperature": 0.05},
    "listwise_kl alone": {"kind": "listwise_kl", "infonce_weight": 0},
    "infonce + listwise_kl": {"kind": "listwise_kl", "infonce_temperature": 0.05},
    "infonce + margin_mse": {"kind": "margin_mse", "infonce_temperature": 0.05},
}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t of so many values, two-sided."""


def pairs(count):
    from rayembed.assets.resolver import resolve
    from rayembed.samples.wikipedia import Wikipedia

    lines = resolve(Wikipedia(held_out=0).pairs("sentence").path).read_text().splitlines()
    rows = [(row["query"], row["positive"]) for row in map(json.loads, lines)]
    random.Random(0).shuffle(rows)
    return rows[:count]


def score(rows, loss, seed, given, output):
    """NDCG@10 of the held-out part, of the student at the start and trained."""
    import rayembed
    from rayembed.config.loss import LOSSES
    from rayembed.samples.assets import MINILM

    settings = dict(loss)
    trained = rayembed.train(
        MINILM,
        rows,
        loss=LOSSES.classes()[settings.pop("kind")](**settings),
        steps=given.steps,
        batch_size=given.batch,
        learning_rate=given.learning_rate,
        output=output,
        settings={
            "seed": seed,
            "model.backbone.num_layers": given.layers,
            "model.query_max_length": given.length,
            "model.document_max_length": given.length,
            "stages.finetune.batch.num_negatives": given.negatives,
            "data.datasets.pairs.mining": {
                "teacher": MINILM,
                "num_negatives": given.negatives,
                "sampling": given.sampling,
                "max_length": given.length,
            },
            "evaluation.baselines": [],
        },
    )
    before, after = (next(iter(of.values())) for of in list(trained.scores.values())[:2])
    return before, after


def table(found):
    """Scores of each arm by seed and their differences to the first as Markdown."""
    base = found["infonce"]
    lines = ["| loss | nDCG@10 by seed | to InfoNCE |", "| --- | --- | ---: |"]
    for arm, scores in found.items():
        apart = [one - other for one, other in zip(scores, base, strict=True)]
        told = f"{statistics.mean(apart):+.4f}"
        if len(apart) > 1:
            spread = statistics.stdev(apart) / len(apart) ** 0.5
            told += f" ± {T_95.get(len(apart), 2.3) * spread:.4f}"
        lines.append(f"| {arm} | {', '.join(f'{one:.4f}' for one in scores)} | {told} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--negatives", type=int, default=4)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--sampling", default="stratified")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    rows = pairs(given.pairs)
    found = {arm: [] for arm in ARMS}
    start = 0.0
    with tempfile.TemporaryDirectory() as output:
        for seed in given.seeds:
            for arm, loss in ARMS.items():
                began = time.monotonic()
                start, trained = score(rows, loss, seed, given, output)
                found[arm].append(trained)
                print(f"{arm} {seed}: {trained:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"\nstart {start:.4f}\n\n{table(found)}")


if __name__ == "__main__":
    main()
