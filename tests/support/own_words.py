"""An evaluation of a tiny model on a set of the user's own that words alone answer."""

import json

from tiny_folders import save_biencoder

from rayembed.config.evaluation import EvaluationRun
from rayembed.config.settings import parse


def own_evaluation(folder, **settings):
    """An evaluation of a tiny model on a set of the user's own, over 40 documents."""
    words = [f"word{i}" for i in range(40)]
    own = folder / "own"
    (own / "qrels").mkdir(parents=True, exist_ok=True)
    rows = [{"_id": f"d{i}", "text": f"{word} in a text"} for i, word in enumerate(words)]
    asked = [{"_id": f"q{i}", "text": f"where is {word}"} for i, word in enumerate(words)]
    (own / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (own / "queries.jsonl").write_text("\n".join(map(json.dumps, asked)))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(40))
    (own / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    values = {
        "model": {"reference": str(save_biencoder(folder / "model"))},
        "own_sets": [{"name": "own", "path": str(own)}],
        "placement": {"storage_path": str(folder / "storage"), "price_per_hour": 2.0},
    }
    return parse(EvaluationRun, {**values, **settings})
