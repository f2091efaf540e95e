"""Recall that maps of queries keep when the model of an index changes, beside full re-embedding.

Two changes over the English articles of the Wikipedia sample, cut to 64 words: all-MiniLM-L6-v2 →
its own fine-tune on descriptions (trained here), and all-MiniLM-L6-v2 → the quickstart's model,
another backbone of other dimensions. Queries are a thousand descriptions, each of one article. The
fine-tune saw none of them, the quickstart's model about 80: it drew 700 of the 8,592 rows.

    python benchmarks/index_upgrades.py --seeds 0 1 2 --quickstart outputs/runs/*/models/blend

Each map is fitted on documents, on their first sentences and some of their words as queries, and on
both. `same as full` is the share of full re-embedding's first 10 documents. Results are lines of a
file; what is in it is not run again.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WORDS, QUERIES, ROWS = 64, 1000, 4000
TASK = "Given a short description, retrieve the article that it describes"


def rows():
    """Descriptions with their articles, in a drawn order."""
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    path = resolve(Wikipedia().pairs("description", "en").path)
    found = [(row["query"], row["positive"]) for row in map(json.loads, path.open())]
    random.Random(0).shuffle(found)
    return [(query, " ".join(text.split()[:WORDS])) for query, text in found]


def fine_tuned(pairs, seed, output, name=None, further=None):
    """Folder of a fine-tune of MiniLM on descriptions, trained if it is not there."""
    import rayembed

    done = rayembed.train(
        "all-MiniLM-L6-v2",
        pairs[QUERIES : QUERIES + ROWS],
        steps=60,
        batch_size=32,
        learning_rate=5e-5,
        name=name or f"upgrade-seed{seed}",
        output=output,
        settings={
            "seed": seed,
            "model.query_max_length": 32,
            "model.document_max_length": 64,
            "data.datasets.pairs.held_out": None,
            "evaluation.guard": None,
            "evaluation.benchmarks": [],
            "evaluation.baselines": [],
            **(further or {}),
        },
    )
    return done.folder


class Remembered:
    """A model that embeds each list of texts once, and keeps the vectors in files."""

    def __init__(self, model, folder):
        self.model, self.reference, self.folder = model, model.reference, folder

    def _of(self, role, texts):
        from rayembed.config.document import fingerprint

        key = fingerprint([self.model.weights, self.model.query_instruction, role, list(texts)])
        file = self.folder / f"{key}.npy"
        if not file.exists():
            np.save(file, getattr(self.model, role)(texts))
        return np.load(file)

    def queries(self, texts):
        return self._of("queries", texts)

    def documents(self, texts):
        return self._of("documents", texts)


def loaded(folder, output, instruction=None):
    from rayembed_extras.index_upgrades.models import load_upgrade_model, weights_of

    vectors = Path(output) / "vectors"
    vectors.mkdir(parents=True, exist_ok=True)
    model = load_upgrade_model(
        Path(folder), weights_of(Path(folder)), Path(folder).name, query_instruction=instruction
    )
    return Remembered(model, vectors)


def sample_of(old, pairs, fits, documents):
    """Articles as an index of the old model; maps are fitted on some that no query asks for."""
    from rayembed_extras.index_upgrades.sample import TextSample

    texts = list(dict.fromkeys(text for _, text in pairs))[:documents]
    asked = {text for _, text in pairs[:QUERIES]}
    names = [f"d{number}" for number in range(len(texts))]
    free = [number for number, text in enumerate(texts) if text not in asked]
    fitted = np.zeros(len(texts), bool)
    fitted[random.Random(1).sample(free, min(fits, len(free)))] = True
    return texts, TextSample(
        tuple(names),
        tuple(texts),
        np.arange(len(texts)),
        old.documents(texts),
        fitted,
        np.ones(len(texts), bool),
        len(texts),
        len(texts),
    )


def judged_of(pairs, texts):
    from rayembed_extras.indexing.judged_queries import JudgedQueries

    names = {text: f"d{number}" for number, text in enumerate(texts)}
    found: dict[str, dict[str, int]] = {}
    for query, text in pairs[:QUERIES]:
        found.setdefault(query, {})[names[text]] = 1
    return JudgedQueries(tuple(found), tuple(found.values()))


def measured(label, seed, sample, old, new, judged, fits):
    """Figures of all roads, for maps fitted on documents and on queries."""
    from rayembed_extras.index_upgrades.compare import compare_roads
    from rayembed_extras.index_upgrades.settings import UpgradeRun

    lines = []
    for fit_on in ("both", "documents", "queries"):
        began = time.perf_counter()
        run = UpgradeRun(name="docs", model="new", queries="given", fit_on=fit_on, seed=seed)
        done = compare_roads(run, sample, old, new, judged)
        for road in done.roads:
            if road.scores is None or (fit_on != "both" and road.kind in (None, "identity")):
                continue
            lines.append(
                {
                    "change": label,
                    "seed": seed,
                    "fits": fits,
                    "fit_on": fit_on,
                    "road": road.label,
                    "recall": float(road.scores.recall.mean()),
                    "ndcg": float(road.scores.ndcg.mean()),
                    "share": None
                    if road.share is None
                    else [road.share.value, *road.share.interval],
                    "same": road.agreement,
                    "best": road.kind is not None and road.kind == done.best.kind,
                    "seconds": road.seconds,
                }
            )
        print(label, seed, fit_on, f"{time.perf_counter() - began:.0f} s", flush=True)
    return lines


def table(lines: Sequence[dict]) -> str:
    """Means over seeds as Markdown; the interval is that of the worst seed's lower end."""
    heads = (
        "| change | fitted on | road | recall@10 | nDCG@10 | share kept | lowest | same as full |"
    )
    shown = [heads, "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    keys = dict.fromkeys((x["change"], x["fits"], x["fit_on"], x["road"]) for x in lines)
    for change, fits, fit_on, road in keys:
        key = (change, fits, fit_on, road)
        of = [x for x in lines if (x["change"], x["fits"], x["fit_on"], x["road"]) == key]
        recall, ndcg = (statistics.mean(x[name] for x in of) for name in ("recall", "ndcg"))
        shares = [x["share"] for x in of if x["share"]]
        kept = [f"{100 * statistics.mean(s[0] for s in shares):.1f} %"] if shares else ["–"]
        kept += [f"{100 * min(s[1] for s in shares):.1f} %"] if shares else ["–"]
        same = "–" if of[0]["same"] is None else f"{statistics.mean(x['same'] for x in of):.3f}"
        mark = f" ({sum(x['best'] for x in of)} of {len(of)})" if any(x["best"] for x in of) else ""
        where = f"{fits:,} {fit_on}" if of[0]["same"] is not None else "–"
        cells = [change, where, road + mark, f"{recall:.4f}", f"{ndcg:.4f}", *kept, same]
        shown.append("| " + " | ".join(cells) + " |")
    return "\n".join(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--fits", type=int, nargs="*", default=[3000])
    parser.add_argument("--documents", type=int, default=4000, help="articles, the asked first")
    parser.add_argument("--quickstart", nargs="*", default=[], help="folders of trained models")
    parser.add_argument("--output", default="outputs")
    parser.add_argument("--results", default="outputs/index-upgrades.jsonl")
    given = parser.parse_args()
    from rayembed.assets.resolver import resolve_model
    from rayembed.recipes.sample import MINILM

    file = Path(given.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in file.open()] if file.exists() else []
    pairs = rows()
    old = loaded(resolve_model(MINILM), given.output)
    changes = [("own fine-tune", seed, None) for seed in given.seeds]
    changes += [("quickstart", seed, folder) for seed, folder in enumerate(given.quickstart)]
    changes.sort(key=lambda change: change[1])
    done = {(x["change"], x["seed"], x["fits"]) for x in known}
    for label, seed, folder in changes:
        if all((label, seed, fits) in done for fits in given.fits):
            continue
        place = folder or fine_tuned(pairs, seed, given.output)
        new = loaded(place, given.output, TASK if folder else None)
        for fits in given.fits:
            if (label, seed, fits) in done:
                continue
            texts, sample = sample_of(old, pairs, fits, given.documents)
            lines = measured(label, seed, sample, old, new, judged_of(pairs, texts), fits)
            known += lines
            with file.open("a") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"\n{table(known)}")


if __name__ == "__main__":
    main()
