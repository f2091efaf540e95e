"""Made-up articles and a run whose evaluation is over them."""

import json

from rayembed.config.run import Run
from rayembed.config.scores import WikipediaTasks
from rayembed.config.settings import parse

COUNT = 240
HELD_OUT = 120


def write_articles(path):
    """Articles of the sample's form; all texts of article i carry the word `own<i>`."""
    articles = {}
    for i in range(COUNT):
        title = f"Title{i} Town"
        articles[title] = {
            "title": title,
            "extract": " ".join(
                f"The sentence number {k} speaks of own{i} in this place." for k in range(4)
            ),
            "description": f"Kind{i % 8} own{i}",
            "topic": f"Topic{i % 4}",
        }
    path.write_text(json.dumps(articles))
    return path


def run_over(path, **evaluation):
    """A run that holds out half of the articles and would train on the others."""
    source = {"kind": "wikipedia", "path": str(path), "pairs": "sentence"}
    sizes = {"num_documents": 100, "num_queries": 100, "max_length": 64}
    sizes |= {
        name: evaluation.pop(name)
        for name in WikipediaTasks.model_fields.keys() & evaluation.keys()
    }
    return parse(
        Run,
        {
            "name": "test",
            "model": {"kind": "biencoder", "backbone": {"path": "none", "dtype": "float32"}},
            "data": {
                "datasets": [{"name": "wiki", "source": source}],
                "held_out": {"num_titles": HELD_OUT},
            },
            "stages": [
                {
                    "name": "one",
                    "datasets": {"wiki": 1.0},
                    "batch": {"global_pairs": 4, "in_batch_negatives": True},
                    "optimizer": {"learning_rate": 1e-4},
                    "steps": 1,
                }
            ],
            "evaluation": {"benchmarks": ["wikipedia"], "wikipedia": sizes, **evaluation},
        },
    )
