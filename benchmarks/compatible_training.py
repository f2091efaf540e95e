"""What training that stays compatible with an old index costs, and what the index then keeps.

all-MiniLM-L6-v2 is trained on descriptions of the Wikipedia sample with their articles, cut to 64
words, as in `index_upgrades.py`: free to move (weight 0) and with `compatible_with` the untrained
model, at several weights. Queries are descriptions of articles that no training saw.

    python benchmarks/compatible_training.py --weights 1 5 20 50 --seeds 0 1 2

`lost` is the nDCG@10 of the model's own queries on its own documents, less that of the model that
was free to move. `kept` is the recall@10 of its queries on the untrained model's documents, as a
share of the free model's on its own documents, as after embedding all again. Results are lines of a
file; what is in it is not run again.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path

import numpy as np

from index_upgrades import WORDS, fine_tuned, loaded, rows

DOCUMENTS = 2000
"""Articles of the index: the asked ones, and others."""


def held_out():
    """Descriptions of held-out titles, each of one article, with their articles."""
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    every, free = (
        [json.loads(line) for line in resolve(sample.pairs("description").path).open()]
        for sample in (Wikipedia(held_out=0), Wikipedia())
    )
    known = {row["id"] for row in free}
    held = [row for row in every if row["id"] not in known]
    often = Counter(row["query"] for row in held)
    return {
        " ".join(row["positive"].split()[:WORDS]): row["query"]
        for row in held
        if often[row["query"]] == 1
    }


def trained(pairs, arm, seed, output):
    """Folder of the model trained with a weight, 0 for none, and a share of old documents."""
    weight, share = arm
    if not weight:
        return fine_tuned(pairs, seed, output)
    loss = {
        "kind": "vector_distillation",
        "infonce_temperature": 0.05,
        "infonce_weight": 1 / weight,
        "teacher_documents": share,
    }
    old = {
        "stages.finetune.compatible_with": "all-MiniLM-L6-v2",
        "stages.finetune.loss": loss,
        "placement.findings": [],
    }
    # A name of a registered model has no dot.
    name = f"compatible-{weight:g}-{share:g}-seed{seed}".replace(".", "_")
    return fine_tuned(pairs, seed, output, name, old)


def scores(queries, documents):
    """Scores where the first documents are those that the queries ask for, in their order."""
    from rayembed_extras.index_upgrades.measure import rank_documents, score

    right = [{number: 1} for number in range(len(queries))]
    return score(rank_documents(queries, documents, np.arange(len(documents))), right)


def measured(model, old, queries, texts):
    """Scores of each query on the model's own documents and on the old model's, and how near its
    documents are to the old ones.
    """
    asked, documents, stored = model.queries(queries), model.documents(texts), old.documents(texts)
    return {
        "own": scores(asked, documents),
        "old": scores(asked, stored),
        "before": scores(old.queries(queries), stored),
        "near": float((documents * stored).sum(axis=1).mean()),
    }


def line_of(arm, seed, free, ours):
    """Figures of a run beside those of the run that was free to move."""
    from rayembed_extras.index_upgrades.measure import difference, share_kept

    full = free["own"]
    own, old, before = (ours[name] for name in ("own", "old", "before"))
    lost, kept = difference(own.ndcg, full.ndcg), share_kept(old, full)
    return {
        "weight": arm[0],
        "across": arm[1],
        "seed": seed,
        "own_ndcg": float(own.ndcg.mean()),
        "own_recall": float(own.recall.mean()),
        "old_ndcg": float(old.ndcg.mean()),
        "old_recall": float(old.recall.mean()),
        "before_ndcg": float(before.ndcg.mean()),
        "before_recall": float(before.recall.mean()),
        "lost": [float((own.ndcg - full.ndcg).mean()), *(lost.interval or (0.0, 0.0))],
        "kept": [kept.value, *kept.interval],
        "kept_ndcg": float(old.ndcg.mean() / full.ndcg.mean()),
        "kept_before": float(before.recall.mean() / full.recall.mean()),
        "near": ours["near"],
    }


def table(lines):
    """Means over seeds as Markdown; in brackets the worse end of the worst seed's interval."""
    heads = (
        "weight",
        "old documents",
        "seeds",
        "own nDCG@10",
        "lost, points (worst)",
        "recall@10 on old documents",
        "kept (lowest)",
        "kept of nDCG@10",
        "old queries keep",
        "cosine to old",
    )
    shown = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---:" for _ in heads) + " |"]
    names = ("weight", "across")
    for key in dict.fromkeys(tuple(x[name] for name in names) for x in lines):
        of = [x for x in lines if tuple(x[name] for name in names) == key]

        def mean(name, at=None, of=of):
            return statistics.mean(x[name] if at is None else x[name][at] for x in of)

        lost, kept = min(x["lost"][1] for x in of), min(x["kept"][1] for x in of)
        cells = [
            f"{key[0]:g}",
            f"{key[1]:g}",
            str(len(of)),
            f"{mean('own_ndcg'):.4f}",
            f"{100 * mean('lost', 0):+.2f} ({100 * lost:+.2f})",
            f"{mean('old_recall'):.4f}",
            f"{100 * mean('kept', 0):.1f} % ({100 * kept:.1f})",
            f"{100 * mean('kept_ndcg'):.1f} %",
            f"{100 * mean('kept_before'):.1f} %",
            f"{mean('near'):.3f}",
        ]
        shown.append("| " + " | ".join(cells) + " |")
    return "\n".join(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=float, nargs="*", default=[1, 5, 20, 50])
    parser.add_argument("--across", type=float, nargs="*", default=[0], help="teacher_documents")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--output", default="outputs")
    parser.add_argument("--results", default="outputs/compatible-training.jsonl")
    given = parser.parse_args()
    from rayembed.assets.resolver import resolve_model
    from rayembed.recipes.sample import MINILM

    file = Path(given.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in file.open()] if file.exists() else []
    pairs, asked = rows(), held_out()
    texts = list(dict.fromkeys([*asked, *(text for _, text in pairs)]))[:DOCUMENTS]
    old = loaded(resolve_model(MINILM), given.output)
    done = {(x["weight"], x["across"], x["seed"]) for x in known}
    arms = [(weight, share) for share in given.across for weight in given.weights]
    for seed in given.seeds:
        free = None
        for arm in ((0.0, 0.0), *arms):
            if (*arm, seed) in done and arm[0]:
                continue
            model = loaded(trained(pairs, arm, seed, given.output), given.output)
            ours = measured(model, old, list(asked.values()), texts)
            free = ours if free is None else free
            if (*arm, seed) in done:
                continue
            known.append(line_of(arm, seed, free, ours))
            with file.open("a") as out:
                out.write(json.dumps(known[-1]) + "\n")
            print(table(known), flush=True)


if __name__ == "__main__":
    main()
