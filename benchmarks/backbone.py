"""A small run for measurements of quality, whose scores separate what should separate.

The student is the first layers of all-MiniLM-L6-v2, its data one of four sets cut from the
Wikipedia sample in three languages: a sentence or a description finds the article it was taken
from. A thousand documents, with their queries, are held out and scored by nDCG@10. A run takes half
a minute to three minutes on two cores.

    python benchmarks/backbone.py --seeds 0 1 2 3 4

trains the student of each set and seed on all rows and on a quarter of them, which is known to be
worse, and prints in how many seeds all rows win, and the spread of the seeds. Results are kept as
lines of a file, and what is in it is not run again: `--results docs/measured/quality.jsonl` goes on
with those that the docs tell. All runs are in float32. Rounding alone moves a seed's score by as
much as seeds differ, so both sides of a difference must come from one kind of machine.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

SETS = {
    "en-sentence": ("sentence", "en"),
    "en-description": ("description", "en"),
    "fr-sentence": ("sentence", "fr"),
    "es-sentence": ("sentence", "es"),
}
"""Name of a set → kind and language of its pairs."""

ARMS = {"infonce": {}, "infonce on a quarter": {"rows": 800}}
"""Name of an arm → arguments of `trained`."""

HELD_OUT = 1000
NEGATIVES = 3
LENGTH = 32
JUDGE_LENGTH = 64
"""Tokens of a query and a document together, as the cross-encoder reads them."""


def pairs(name, count):
    """So many rows of a set and as many as are held out, which are drawn of all of them."""
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    kind, language = SETS[name]
    path = resolve(Wikipedia().pairs(kind, language).path)
    rows = [(row["query"], row["positive"]) for row in map(json.loads, path.open())]
    random.Random(0).shuffle(rows)
    return rows[: HELD_OUT + count]


def cross_encoder(folder=Path("outputs")):
    """Path of a cross-encoder in the folder, trained if it is not there, on English pairs of the
    sample: a sentence and its article against one drawn from all and one that the teacher takes for
    near.
    """
    place = folder.absolute() / "cross-encoder"
    if place.exists():
        return str(place)
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.cross_encoder import CrossEncoderTrainer as Trainer
    from sentence_transformers.cross_encoder import CrossEncoderTrainingArguments as Arguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.util import semantic_search

    from rayembed.assets.resolver import resolve_model
    from rayembed.recipes.sample import MINILM

    start = str(resolve_model(MINILM))
    # Rows behind those that any arm of English sentences learns from or is scored on.
    rows = pairs("en-sentence", 7400)[HELD_OUT + 3200 :]
    queries, documents = map(list, zip(*rows, strict=True))
    teacher = SentenceTransformer(start, device="cpu")
    vectors = [teacher.encode(texts, normalize_embeddings=True) for texts in (queries, documents)]
    found = semantic_search(*vectors, top_k=20)
    draw = random.Random(0)
    labelled = []
    for i, hits in enumerate(found):
        near = [hit["corpus_id"] for hit in hits if documents[hit["corpus_id"]] != documents[i]]
        labelled.append((queries[i], documents[i], 1.0))
        labelled.append((queries[i], documents[draw.choice(near)], 0.0))
        labelled.append((queries[i], draw.choice([d for d in documents if d != documents[i]]), 0.0))
    model = CrossEncoder(start, num_labels=1, max_length=JUDGE_LENGTH, device="cpu")
    names = ("query", "document", "label")
    data = Dataset.from_dict(dict(zip(names, zip(*labelled, strict=True), strict=True)))
    arguments = Arguments(
        output_dir=f"{folder}/checkpoints",
        per_device_train_batch_size=32,
        num_train_epochs=1,
        learning_rate=2e-4,
        warmup_ratio=0.1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=0,
    )
    Trainer(model, arguments, data, loss=BinaryCrossEntropyLoss(model)).train()
    model.save_pretrained(str(place))
    return str(place)


def mining(**values):
    """Hard negatives that the whole of all-MiniLM-L6-v2 finds and scores."""
    from rayembed.recipes.sample import MINILM

    return {
        "teacher": MINILM,
        "num_negatives": NEGATIVES,
        "max_length": 64,
        "candidates": 50,
        "sampling": "stratified",
        **values,
    }


def trained(name, seed, output, *, loss=None, rows=3200, given=None, steps=100, **settings):
    """Train the student on a set.

    Args:
        output: folder of all results; runs that share it prepare and mine the same data once.
        loss: settings of the loss; None: InfoNCE's.
        rows: number of training rows.
        given: rows in place of the set's, those of the held-out part among them.
        settings: further ones by path.
    """
    import rayembed
    from rayembed.config.loss import LOSSES
    from rayembed.recipes.sample import MINILM

    found = dict(loss or {"kind": "infonce", "temperature": 0.05})
    given = pairs(name, rows) if given is None else given
    return rayembed.train(
        MINILM,
        given,
        loss=LOSSES.classes()[found.pop("kind")](**found),
        steps=steps,
        batch_size=32,
        learning_rate=2e-4,
        output=output,
        settings={
            "seed": seed,
            "model.backbone.num_layers": 2,
            "model.backbone.dtype": "float32",
            "model.query_max_length": LENGTH,
            "model.document_max_length": LENGTH,
            "stages.finetune.batch.num_negatives": NEGATIVES,
            "data.datasets.pairs.mining": mining(),
            "data.datasets.pairs.held_out.share": HELD_OUT / len(given),
            "evaluation.baselines": [],
            "evaluation.guard": None,
            "evaluation.benchmarks": [],
            **settings,
        },
    )


def scores_of(run):
    """Main scores by task of the student at the start and trained, and of others by their names."""
    before, after, *others = run.scores.items()
    return {"start": before[1], "trained": after[1], **dict(others)}


def measured(file, name, arm, seed, run):
    """Scores of an arm in a set and seed: those in the file, or of `run()`, then added to it."""
    key = {"set": name, "arm": arm, "seed": seed}
    lines = [json.loads(line) for line in file.open()] if file.exists() else []
    for line in lines:
        if {field: line[field] for field in key} == key:
            return line["scores"]
    from rayembed.registry.provenance import cpu_summary

    began = time.monotonic()
    scores = scores_of(run())
    seconds = round(time.monotonic() - began)
    with file.open("a") as sink:
        machine = cpu_summary()
        told = {**key, "machine": machine, "seconds": seconds, "scores": scores}
        sink.write(json.dumps(told) + "\n")
    print(f"{name}, {arm}, seed {seed}: {scores}, {seconds} s", flush=True)
    return scores


def apart(one, other):
    """Differences by seed as text: mean, half-width of its 95 % interval, and how many are above
    0.
    """
    from rayembed_extras.sweeps.seeds import difference

    return difference([a - b for a, b in zip(one, other, strict=True)]).text()


def own_score(scores, model="trained"):
    """Score on the held-out part."""
    return scores[model]["pairs-held-out"]


def table(found):
    """Set → arm → scores by seed as Markdown: mean and standard deviation of the first arm, and
    differences of the others to it by seed.
    """
    first, *others = next(iter(found.values()))
    columns = ["set", first, "± by seed", *(f"{arm}, difference" for arm in others)]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for name, arms in found.items():
        spread = f"{statistics.stdev(arms[first]):.4f}" if len(arms[first]) > 1 else "-"
        cells = [name, f"{statistics.mean(arms[first]):.4f}", spread]
        cells += [apart(arms[arm], arms[first]) for arm in others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parsed(description, arms):
    """Arguments of a measurement; the file of results has its folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path("outputs/quality.jsonl"))
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    return given


def main():
    given = parsed(__doc__, ARMS)
    found = {}
    for name in given.sets:
        with tempfile.TemporaryDirectory() as output:
            for seed in given.seeds:
                for arm in given.arms:
                    run = partial(trained, name, seed, output, **ARMS[arm])
                    scores = measured(given.results, name, arm, seed, run)
                    found.setdefault(name, {}).setdefault(arm, []).append(own_score(scores))
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
