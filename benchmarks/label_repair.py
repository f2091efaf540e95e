"""Planted false negatives: how many label repair finds, and what they do to quality.

The articles of a set of `backbone.py` are cut in halves, one of which is the positive. Of a third
of the rows the other half, which the query was as much taken from, stands among the negatives; the
others are drawn. The judge is the cross-encoder of `backbone.py`, trained on other articles in
English; French and Spanish it meets as they come.

    python benchmarks/label_repair.py --seeds 0 1 2 --sets en-sentence fr-sentence
"""

import random
import tempfile
from functools import partial
from pathlib import Path

from backbone import (
    HELD_OUT,
    JUDGE_LENGTH,
    NEGATIVES,
    cross_encoder,
    measured,
    own_score,
    pairs,
    parsed,
    table,
    trained,
)

ARMS = {"none planted": None, "planted": None, "dropped": "drop", "relabelled": "relabel"}
"""Arm → action of label repair; None: there is none."""


def halves(name, share=1 / 3):
    """Rows of a set with half of each article, and the false negatives of so many of them."""
    from rayembed.data.sentences import split_sentences

    draw = random.Random(0)
    cut = []
    for query, article in pairs(name, 4000):
        sentences = split_sentences(article)
        middle = len(sentences) // 2
        if middle:
            cut.append((query, " ".join(sentences[:middle]), " ".join(sentences[middle:])))
    rows, false = [], set()
    for query, positive, other in cut[: HELD_OUT + 2000]:
        negatives = [draw.choice(cut)[1] for _ in range(NEGATIVES)]
        if draw.random() < share:
            negatives[0] = other
            false.add((query, other))
        rows.append((query, positive, negatives))
    return rows, false


def arm_settings(name, arm, reranker):
    """Arguments of `trained`."""
    found = {
        "given": halves(name, share=0 if arm == "none planted" else 1 / 3)[0],
        "data.datasets.pairs.mining": None,
        "data.datasets.pairs.source.max_rejected_share": 0.1,
    }
    if ARMS[arm] is not None:
        judge = {
            "kind": "cross_encoder",
            "model": reranker,
            "max_length": JUDGE_LENGTH,
            "margin": None,
        }
        repair = {"judge": {**judge, "min_score": 0.4}, "action": ARMS[arm]}
        found["data.datasets.pairs.repair"] = repair
    return found


def shares(name, output):
    """How many of the planted negatives and of the others were dropped from training rows."""
    from rayembed.data.hashes import text_hash
    from rayembed.data.parts import read_records

    paths = Path(output).glob("data/repaired/*/**/*.parquet")
    records = {record.query: record for path in paths for record in read_records(str(path))}
    rows, false = halves(name)
    counts = {"planted": [0, 0], "others": [0, 0]}
    for query, _, negatives in rows:
        for text in negatives if query in records else ():
            count = counts["planted" if (query, text) in false else "others"]
            count[0] += text_hash(text) in records[query].false_negatives
            count[1] += 1
    return "; ".join(f"{hit} of {all_} {kind}" for kind, (hit, all_) in counts.items())


def main():
    given = parsed(__doc__, ARMS)
    reranker = cross_encoder(given.results.parent)
    found = {name: {} for name in given.sets}
    for name in given.sets:
        with tempfile.TemporaryDirectory() as output:
            for seed in given.seeds:
                for arm in given.arms:
                    settings = arm_settings(name, arm, reranker)
                    run = partial(trained, name, seed, output, **settings)
                    scores = measured(given.results, name, arm, seed, run)
                    found[name].setdefault(arm, []).append(own_score(scores))
                    if arm == "dropped" and list(Path(output).glob("data/repaired/*")):
                        told = shares(name, output)
                        print(f"{name}, dropped of negatives: {told}", flush=True)
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
