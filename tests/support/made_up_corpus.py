"""A corpus and queries of made-up words, and a search in it as mteb asks for one."""

import numpy as np
from datasets import Dataset


class Metadata:
    """What the model reads of a task."""

    modalities = ("text",)

    def __init__(self, name):
        self.name = name

    def get_modalities(self, prompt_type):
        return ["text"]


def made_up_corpus(count, seed=0):
    drawn = np.random.default_rng(seed)
    texts = [" ".join(f"w{n}" for n in drawn.integers(0, 400, 12)) for _ in range(count)]
    texts[7], texts[count // 2] = texts[3], texts[3]
    return Dataset.from_dict(
        {
            "id": [f"d{row}" for row in range(count)],
            "title": [f"Title {row % 5}" if row % 3 == 0 else "" for row in range(count)],
            "text": texts,
        }
    )


def made_up_queries(count, seed=1):
    drawn = np.random.default_rng(seed)
    texts = [" ".join(f"w{n}" for n in drawn.integers(0, 400, 4)) for _ in range(count)]
    return Dataset.from_dict({"id": [f"q{row}" for row in range(count)], "text": texts})


def search(model, corpus, queries, k, top_ranked=None, name="MadeUp"):
    model.index(corpus)
    return model.search(
        queries,
        task_metadata=Metadata(name),
        hf_split="test",
        hf_subset="default",
        top_k=k,
        top_ranked=top_ranked,
    )
