"""A model that embeds a made-up article's texts as a row of a table."""

import json
import re

import numpy as np
import torch
from made_up_articles import COUNT
from plain_sample import plain_sets, sizes_of

from rayembed.assets.resolver import resolve
from rayembed.config.settings import parse
from rayembed.models.contract import EmbeddingModel, EmbedOutput
from rayembed.recipes.sample import PREFIX, ScoreSizes, own_sets

WIDTH = COUNT + 8 + 4


def number(text):
    """Which article a text is from: its own word, or its number in a title."""
    return int(re.search(r"(?:own|Title)(\d+)", text)[1])


def held_out_numbers(run):
    """The articles that no row of the run's training is made of."""
    rows = resolve(run.data.datasets[0].source.path).read_text().splitlines()
    return set(range(COUNT)) - {number(json.loads(row)["id"]) for row in rows}


def changed(run, **settings):
    """The run with other settings of its evaluation or of the sample's tasks."""
    sizes = sizes_of(run.evaluation.own_sets)
    known = {own.languages for own in run.evaluation.own_sets if own.kind == "retrieval"}
    codes = {code for languages in known for code in languages}
    given = {"languages": tuple({"fra-Latn": "fr", "spa-Latn": "es"}[code] for code in codes)}
    given |= {name: settings.pop(name) for name in ScoreSizes.model_fields if name in settings}
    if "own_sets" not in settings:
        made = own_sets if run.evaluation.own_sets[0].path.startswith(PREFIX) else plain_sets
        settings["own_sets"] = made(parse(ScoreSizes, {**dict(sizes), **given}))
    return run.model_copy(update={"evaluation": run.evaluation.model_copy(update=settings)})


class NumberTokenizer:
    """Tokenises a text to the number of its article."""

    def __init__(self):
        self.seen = []

    def __call__(self, texts, role, instructions=None, *, allow_empty=False):
        instructions = instructions or [""] * len(texts)
        self.seen += list(zip(texts, [role] * len(texts), instructions, strict=True))
        return [{"input_ids": np.array([number(text)], dtype=np.int32)} for text in texts]

    def collate(self, tokens):
        ids = torch.tensor(np.stack([t["input_ids"] for t in tokens])).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class TableModel(EmbeddingModel):
    """Embeds a text as the row of its article in a table."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table, dtype=torch.float32))
        self.tokenizer = NumberTokenizer()
        self.dimensions = (table.shape[1],)

    def forward(self, batch, context=None):
        rows = self.table[batch["input_ids"][:, 0]]
        return EmbedOutput(torch.nn.functional.normalize(rows, dim=-1))


def oracle():
    """Knows article, kind of description and topic: the more is shared, the closer."""
    table = np.zeros((COUNT, WIDTH))
    for i in range(COUNT):
        table[i, i] = 1.0
        table[i, COUNT + i % 8] = 0.8
        table[i, COUNT + 8 + i % 4] = 3.0
    return TableModel(table)
