"""Golden vectors and scores of tiny models, whose weights come from NumPy's frozen generator.

    python tests/support/golden.py KIND     writes tests/golden/KIND.json

A file holds the numbers `VECTORS` and `SCORES` that it was made with. What has moved is written
only after its number was raised.
"""

import json
import os
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from tiny_folders import save_tiny
from tiny_models import LINES, save_cross_encoder

from rayembed.config.evaluation import BM25, ModelUnderTest
from rayembed.config.mining import CrossEncoder, Teacher
from rayembed.config.model import ARCHITECTURES
from rayembed.config.own_sets import Scores
from rayembed.config.settings import parse
from rayembed.data.mining.rescoring import load_cross_encoder
from rayembed.data.vectors.teacher import load_teacher
from rayembed.evaluation.bm25 import Bm25, bm25_meta
from rayembed.evaluation.model_spec import SCORES
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.run_scores import make_spec
from rayembed.evaluation.score import Store, score
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode, encode_context
from rayembed.models.versions import VECTORS

FILES = Path(__file__).parents[1] / "golden"
KINDS = [kind for kind, each in ARCHITECTURES.classes().items() if each.embeds]
KINDS += ["cross-encoder", BM25]
TOLERANCE = 1e-5
"""Of float32: other processors and libraries add up in another order, by less than 1e-6."""

TEXTS = [
    *LINES[1:],
    "Paris",
    "where do dogs live? " * 12,  # longer than the tiny models read
    "Größe: 7 cats — 7 dogs",
    "the capital of the ancient world",
]
TOPICS = {
    "animals": ["cats and dogs", "the brown fox", "a lazy dog", "foxes jump over cats"],
    "places": ["Paris in France", "the capital of France", "the ancient world", "7 wonders"],
}


def frozen_weights(folder):
    """The folder, with weights that depend on the names and shapes of the tensors alone."""
    for path in sorted(Path(folder).rglob("*.safetensors")):
        tensors = safetensors.torch.load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                # The stream of this older generator never changes, unlike torch's.
                drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(
                    tuple(tensor.shape)
                )
                middle = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
                tensors[name] = torch.tensor(middle + 0.2 * drawn, dtype=tensor.dtype)
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return Path(folder)


def golden(kind, home):
    """What a file of the kind holds: the numbers, vectors by way and scores by task."""
    made = {"VECTORS": VECTORS, "SCORES": SCORES, "vectors": {}, "scores": {}}
    if kind == BM25:
        made["scores"] = scores_of(Bm25(bm25_meta("tests/bm25", "r")), home)
    elif kind == "cross-encoder":
        folder = frozen_weights(save_cross_encoder(home / "model"))
        settings = CrossEncoder(model=str(folder), dtype="float32")
        scorer = load_cross_encoder(settings, weights_fingerprint(folder))
        pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
        made["vectors"] = {"pairs": np.asarray(scorer(pairs))[:, None]}
    else:
        folder = frozen_weights(save_tiny(kind, home / "model"))
        made["vectors"] = vectors_of(folder)
        settings = ModelUnderTest(reference=str(folder), dtype="float32")
        made["scores"] = scores_of(make_spec(settings), home)
    return made


def vectors_of(folder):
    """Way → vectors of the texts by the model of a folder."""
    model = load_model(folder, dtype="float32")
    context = encode_context(model, TEXTS[:4]) if model.uses_context else None
    teacher = Teacher(teacher=str(folder), dtype="float32", query_prefix="find: ")
    return {
        "queries": encode(model, TEXTS, role="query", instruction="Given a", context=context),
        "documents": encode(model, TEXTS, role="document", context=context),
        "teacher": load_teacher(teacher, weights_fingerprint(folder))(TEXTS, "query"),
    }


def scores_of(model, home):
    """Task → main score on small sets of every kind, which BM25 takes only for retrieval."""
    texts = [(text, topic) for topic, some in TOPICS.items() for text in some]
    rows = [{"text": text, "label": topic} for text, topic in texts]
    pairs = [
        {"sentence1": a, "sentence2": b, "label": int(x == y), "score": len({*a} & {*b})}
        for (a, x), (b, y) in zip(texts, texts[2:] + texts[:2], strict=True)
    ]
    documents = [{"_id": f"d{n}", "text": text} for n, (text, _) in enumerate(texts)]
    queries = [{"_id": f"q{n}", "text": text} for n, text in enumerate(["a dog", "France", "7"])]
    judged = ["q0\td2\t1", "q0\td0\t1", "q1\td4\t2", "q1\td5\t1", "q2\td7\t1"]
    files = {
        "rows.jsonl": rows,
        "pairs.jsonl": [{k: v for k, v in row.items() if k != "score"} for row in pairs],
        "grades.jsonl": [{k: v for k, v in row.items() if k != "label"} for row in pairs],
        "own/corpus.jsonl": documents,
        "own/queries.jsonl": queries,
    }
    (home / "own" / "qrels").mkdir(parents=True)
    for name, lines in files.items():
        (home / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "own" / "qrels" / "test.tsv").write_text(
        "\n".join(["query-id\tcorpus-id\tscore", *judged])
    )
    table = str(home / "rows.jsonl")
    own_sets = [{"kind": "retrieval", "name": "Retrieval", "path": str(home / "own")}]
    if not isinstance(model, Bm25):
        own_sets += [
            {"kind": "classification", "name": "Classes", "path": table, "train": table}
            | {"samples_per_label": 2, "experiments": 2},
            {"kind": "clustering", "name": "Clusters", "path": table, "experiments": 2},
            {
                "kind": "pair_classification",
                "name": "Pairs",
                "path": str(home / "pairs.jsonl"),
            },
            {"kind": "sts", "name": "Grades", "path": str(home / "grades.jsonl")},
        ]
    factories = task_factories(parse(Scores, {"own_sets": own_sets}))
    scored = score(model, factories, run_here, Store(str(home / "results")))
    for _, error in scored.failed:
        raise error
    return scored.scores


def moved(kind, made):
    """What differs from the kind's file, with what to do; empty: nothing does."""
    remake = f"`python tests/support/golden.py {kind}`"
    path = FILES / f"{kind}.json"
    if not path.exists():
        return [f"{kind} has no golden vectors and scores: make them with {remake}"]
    kept = json.loads(path.read_text())
    told = []
    for what, number, place in (
        ("vectors", VECTORS, "VECTORS in models/versions.py"),
        ("scores", SCORES, "SCORES in evaluation/model_spec.py"),
    ):
        raised = f"{what} of {kind} were made with another number: make them with {remake}"
        if kept[what.upper()] != number:
            told.append(raised)
        elif kept[what].keys() != made[what].keys() or any(
            not np.allclose(made[what][name], kept[what][name], rtol=0, atol=TOLERANCE)
            for name in kept[what]
        ):
            told.append(
                f"{what} of {kind} moved. Unless this is a fault, raise {place}, so that nothing "
                f"made before is taken for what is made now, and then make them with {remake}"
            )
    return told


def main(kind):
    """Write the file of a kind, unless something moved whose number was not raised."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["RAYEMBED_CACHE"] = str(Path(home, "cache"))
        made = golden(kind, Path(home))
    path = FILES / f"{kind}.json"
    if faults := [one for one in moved(kind, made) if " moved. " in one]:
        sys.exit("\n".join(faults))
    made["vectors"] = {
        way: np.round(np.float64(found), 7).tolist() for way, found in made["vectors"].items()
    }
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in made.items())
    path.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
