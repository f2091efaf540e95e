"""Made-up articles and a run whose evaluation is over them."""

import json
from pathlib import Path

from plain_sample import PlainSample

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.recipes.sample import RETRIEVAL_TASKS, ScoreSizes, Wikipedia

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


def sample_over(path, *, held_out=HELD_OUT, seed=0):
    """The sample of made-up articles, as plain files beside them."""
    return PlainSample(Path(path), held_out, seed)


def wikipedia_over(path, *, held_out=HELD_OUT, seed=0, **settings):
    """The sample of made-up articles, as the package makes it that brings the Wikipedia sample."""
    return Wikipedia(source=str(path), held_out=held_out, seed=seed, **settings)


def validation_over(sample, sizes, *, held_out=30, queries=300):
    """Sets of validation over the held-out articles behind those of the scores."""
    values = {
        "held_out": held_out,
        "first": sizes.get("first", 0) + sizes["held_out"],
        "documents": held_out,
        "queries": min(queries, held_out),
    }
    return sample.scores(RETRIEVAL_TASKS, **{**sizes, **values})


def run_over(path, *, held_out=HELD_OUT, seed=0, sampled=sample_over, **evaluation):
    """A run that holds out half of the articles and would train on the others."""
    sample = sampled(path, held_out=held_out, seed=seed)
    sizes = {"documents": min(100, held_out), "queries": min(100, held_out), "max_length": 64}
    sizes |= {
        name: evaluation.pop(name) for name in ScoreSizes.model_fields.keys() & evaluation.keys()
    }
    return parse(
        Run,
        {
            "name": "test",
            "seed": seed,
            "model": {"kind": "biencoder", "backbone": {"path": "none", "dtype": "float32"}},
            "data": {"datasets": [{"name": "wiki", "source": sample.pairs("sentence")}]},
            "stages": [
                {
                    "name": "one",
                    "datasets": {"wiki": 1.0},
                    "batch": {"global_pairs": 4, "in_batch_negatives": True},
                    "optimizer": {"learning_rate": 1e-4},
                    "steps": 1,
                }
            ],
            "evaluation": {"own_sets": sample.scores(**sizes), **evaluation},
        },
    )
