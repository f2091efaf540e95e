"""Made-up texts, batch plans with test texts among others, and a model without weights."""

import random

from word_model import WordSpec

from rayembed.data.engine.parts import write_part
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record

CHANCE = random.Random(7)
WORDS = ["".join(CHANCE.choices("abcdefghijklmnoprstuvwz", k=6)) for _ in range(400)]


def text(words):
    return " ".join(CHANCE.choices(WORDS, k=words))


def like(other, words):
    """A text that shares some words with another."""
    return " ".join([*CHANCE.sample(other.split(), words), text(6)])


def planted(texts):
    """A third of the texts as they are, a third within longer ones, a third in other case and
    punctuation.
    """
    ways = (
        lambda one: one,
        lambda one: f"{text(20)} {one} {text(20)}",
        lambda one: f"  {one.upper().replace(' ', ', ')}!",
    )
    return [ways[n % 3](one) for n, one in enumerate(texts)]


def plan_of(folder, texts):
    """A batch plan with the texts among others, as queries, positives and negatives."""
    rest = [text(12) for _ in range(300)]
    some = [*texts, *rest]
    CHANCE.shuffle(some)
    records = [
        Record(
            id=str(n),
            query=one if n % 3 == 0 else f"{text(7)} {n}",
            positives=(one if n % 3 == 1 else f"{text(8)} {n}",),
            negatives=(Negative(one if n % 3 == 2 else f"{text(9)} {n}"),),
            dataset="pairs",
        )
        for n, one in enumerate(some)
    ]
    parts = {"pairs": [write_part(str(folder / "parts"), records)]}
    config = PlanConfig({"pairs": 1.0}, 4, 1, 0, 0, True, key="s", epochs=2)
    return write_plan(str(folder / "plan"), parts, config).folder


class Words(WordSpec):
    def shown(self, encode_spec):
        return encode_spec.instruction
