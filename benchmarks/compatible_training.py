"""What training that stays compatible with an old index costs, and what the index then keeps.

all-MiniLM-L6-v2 is trained on descriptions and sentences of the Wikipedia sample, each with its
article, cut to 64 words: free to move (weight 0) and with `compatible_with` the untrained model, at
several weights. Queries are descriptions and sentences of articles that no training saw.

    python benchmarks/compatible_training.py --weights 0 1 5 20 50 --seeds 0 1 2

`lost` is the nDCG@10 of the model's own queries on its own documents, less that of the model that
was free to move. `kept` is the recall@10 of its queries on the untrained model's documents, as a
share of the free model's on its own documents, as after embedding all again. Results are lines of a
file; what is in it is not run again.
"""

import argparse
import json
import random
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
from index_upgrades import WORDS, loaded

KINDS = ("description", "sentence")
DOCUMENTS = 3000
"""Documents of an index: those of the held-out titles, and others."""


def rows():
    """Rows for training, and for each kind held-out queries with their documents."""
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    train, tasks = [], {}
    for kind in KINDS:
        # The rows that leave no title out, less those for training.
        every, free = (
            [json.loads(line) for line in resolve(sample.pairs(kind).path).open()]
            for sample in (Wikipedia(held_out=0), Wikipedia())
        )
        known = {row["id"] for row in free}
        cut = [(r["query"], " ".join(r["positive"].split()[:WORDS]), r["id"]) for r in every]
        random.Random(0).shuffle(cut)
        rest = [(query, text) for query, text, name in cut if name in known]
        held = [(query, text) for query, text, name in cut if name not in known]
        often = Counter(query for query, _, _ in cut)
        asked = [pair for pair in held if often[pair[0]] == 1]
        texts = list(dict.fromkeys(text for _, text in asked + rest))[:DOCUMENTS]
        tasks[kind] = [query for query, _ in asked], [text for _, text in asked], texts
        train += rest
    random.Random(0).shuffle(train)
    return train, tasks


def trained(pairs, weight, seed, given):
    """Folder of the model trained with a weight, 0 for none."""
    import rayembed

    old = {"model": "all-MiniLM-L6-v2", "weight": weight}
    done = rayembed.train(
        "all-MiniLM-L6-v2",
        pairs,
        steps=given.steps,
        batch_size=given.pairs,
        learning_rate=5e-5,
        name=f"compatible-{given.steps}x{given.pairs}-weight{weight:g}-seed{seed}",
        output=given.output,
        settings={
            "seed": seed,
            "model.query_max_length": 64,
            "model.document_max_length": 64,
            "data.datasets.pairs.held_out": None,
            "evaluation.guard": None,
            "evaluation.benchmarks": [],
            "evaluation.baselines": [],
            "placement.findings": [],
            **({"stages.finetune.compatible_with": old} if weight else {}),
        },
    )
    return done.folder


def scores(queries, documents, right):
    from rayembed_extras.index_upgrades.measure import rank_documents, score

    return score(rank_documents(queries, documents, np.arange(len(documents))), right)


def measured(model, old, tasks):
    """Scores of each query on the model's own documents and on the old model's, and how near its
    documents are to the old ones.
    """
    found = {"own": [], "old": [], "before": [], "near": []}
    for asked, positives, texts in tasks.values():
        numbers = {text: number for number, text in enumerate(texts)}
        right = [{numbers[text]: 1} for text in positives]
        queries, documents = model.queries(asked), model.documents(texts)
        stored = old.documents(texts)
        found["own"].append(scores(queries, documents, right))
        found["old"].append(scores(queries, stored, right))
        found["before"].append(scores(old.queries(asked), stored, right))
        found["near"].append(float((documents * stored).sum(axis=1).mean()))
    return found


def lines_of(weight, seed, free, ours, given):
    """Figures of a run beside those of the run that was free to move."""
    from rayembed_extras.index_upgrades.measure import QueryScores, difference, share_kept

    def joined(name, of):
        # Tasks have nearly as many queries, so their mean is that of all.
        return QueryScores(
            np.concatenate([one.recall for one in of[name]]),
            np.concatenate([one.ndcg for one in of[name]]),
        )

    full = joined("own", free)
    own, old, before = (joined(name, ours) for name in ("own", "old", "before"))
    lost, kept = difference(own.ndcg, full.ndcg), share_kept(old, full)
    return {
        "steps": given.steps,
        "pairs": given.pairs,
        "weight": weight,
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
        "near": statistics.mean(ours["near"]),
        "tasks": {
            kind: [float(ours[name][at].recall.mean()) for name in ("own", "old", "before")]
            for at, kind in enumerate(KINDS)
        },
    }


def table(lines):
    """Means over seeds as Markdown; in brackets the worse end of the worst seed's interval."""
    shown = [
        "| steps | weight | seeds | own nDCG@10 | lost, points (worst) | recall@10 on old documents "
        "| kept (lowest) | kept of nDCG@10 | old queries keep | cosine to old |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key in dict.fromkeys((x["steps"], x["pairs"], x["weight"]) for x in lines):
        of = [x for x in lines if (x["steps"], x["pairs"], x["weight"]) == key]

        def mean(name, at=None, of=of):
            return statistics.mean(x[name] if at is None else x[name][at] for x in of)

        lost, kept = min(x["lost"][1] for x in of), min(x["kept"][1] for x in of)
        cells = [
            f"{key[0]} of {key[1]}",
            f"{key[2]:g}",
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
    parser.add_argument("--weights", type=float, nargs="*", default=[0, 1, 5, 20, 50])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--output", default="outputs")
    parser.add_argument("--results", default="outputs/compatible-training.jsonl")
    given = parser.parse_args()
    from rayembed.assets.resolver import resolve_model
    from rayembed.recipes.sample import MINILM

    file = Path(given.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in file.open()] if file.exists() else []
    pairs, tasks = rows()
    old = loaded(resolve_model(MINILM), given.output)
    done = {(x["steps"], x["pairs"], x["weight"], x["seed"]) for x in known}
    for seed in given.seeds:
        free = None
        for weight in (0.0, *(one for one in given.weights if one)):
            key = (given.steps, given.pairs, weight, seed)
            if key in done and weight:
                continue
            place = trained(pairs, weight, seed, given)
            ours = measured(loaded(place, given.output), old, tasks)
            free = ours if free is None else free
            if key in done:
                continue
            known.append(lines_of(weight, seed, free, ours, given))
            with file.open("a") as out:
                out.write(json.dumps(known[-1]) + "\n")
            print(table(known), flush=True)


if __name__ == "__main__":
    main()
