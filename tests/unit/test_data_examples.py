"""In-context examples: drawn by the plan and the slot, whoever reads."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from toy_model import ToyTokenizer

from rayembed.data.engine.parts import write_part
from rayembed.data.plan.batch_plan import Pair
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.stream import PairSteps, with_examples
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Record

PAIRS, STEPS = 12, 40


class InContext(ToyTokenizer):
    """Shows examples as `query>positive|…|instruction` and keeps what instructions it was given."""

    def __init__(self, max_examples=3):
        self.max_examples = max_examples
        self.seen = []

    def instruct(self, instruction, examples):
        return "|".join([*(f"{query}>{positive}" for query, positive in examples), instruction])

    def __call__(self, texts, role, instructions=None):
        if role == "query":
            self.seen += zip(texts, instructions, strict=True)
        return super().__call__(texts, role, instructions)


def rows(name, count, instruction):
    return [
        Record(
            id=f"{name}/{i}",
            query=f"q {name} {i}",
            positives=(f"p {name} {i}", f"other {name} {i}"),
            dataset=name,
            query_instruction=instruction,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    sources = {"a": rows("a", 48, "find a"), "b": rows("b", 24, "find b"), "c": rows("c", 24, "")}
    parts = {name: [write_part(str(folder), found)] for name, found in sources.items()}
    config = PlanConfig(
        weights={"a": 2.0, "b": 1.0, "c": 1.0},
        global_pairs=PAIRS,
        num_negatives=0,
        num_steps=STEPS,
        seed=3,
        in_batch_negatives=True,
        key="stage",
    )
    return write_plan(str(folder / "plan"), parts, config)


def told(plan, workers):
    """What stands before each query, (steps, slots) as pairs of query and instruction."""
    found = []
    for worker in range(workers):
        tokenizer = InContext()
        list(map(PairSteps(plan, tokenizer, worker, workers), range(plan.num_steps)))
        found.append(np.array(tokenizer.seen, dtype=object).reshape(STEPS, PAIRS // workers, 2))
    return np.concatenate(found, axis=1).tolist()


@pytest.mark.parametrize("workers", [2, 4])
def test_every_number_of_workers_sees_the_same_examples(plan, workers):
    assert told(plan, workers) == told(plan, 1)


def test_examples_are_other_pairs_of_the_same_task_from_the_same_batch(plan):
    counts = []
    for step, batch in enumerate(told(plan, 1)):
        positives = {r.query: r.positives[0] for r in plan.read(step)}
        for query, instruction in batch:
            name = query.split()[1]
            if name == "c":
                assert instruction == ""
                continue
            *examples, last = instruction.split("|")
            assert last == f"find {name}"
            pairs = [tuple(example.split(">")) for example in examples]
            assert len(set(pairs)) == len(pairs)
            for other, positive in pairs:
                assert other != query
                assert re.fullmatch(rf"q {name} \d+", other)
                assert positives[other] == positive
            if name == "a":  # of b a batch has but two other rows
                counts.append(len(pairs))
    shares = np.bincount(counts, minlength=4) / len(counts)
    assert len(shares) == 4
    assert np.abs(shares - 0.25).max() < 0.11  # 240 queries: four standard deviations


def test_a_step_read_again_has_the_same_examples_and_another_step_has_others(plan):
    tokenizer = InContext()
    records = [dataclasses.replace(r, query_instruction="find a") for r in plan.read(0)]
    pairs = plan.read_pairs(0)
    assert [pair.query for pair in pairs] == [r.query for r in records]
    first = with_examples(plan, 0, plan.read(0), 0, tokenizer)
    assert first == with_examples(plan, 0, plan.read(0), 0, tokenizer)
    assert first != with_examples(plan, 0, plan.read(0), 1, tokenizer)


def test_without_examples_the_batches_are_the_plans(plan):
    none, plain = InContext(max_examples=0), ToyTokenizer()
    left, right = (list(map(PairSteps(plan, t), range(plan.num_steps))) for t in (none, plain))
    assert all("|" not in instruction for _, instruction in none.seen)
    assert [b.query_hash.tolist() for b in left] == [b.query_hash.tolist() for b in right]


def test_texts_of_a_query_in_another_spelling_are_not_shown_to_it():
    shown = [
        ("Q A  0", ["fine"]),
        ("other", ["p a 0 "]),
        ("third", ["Other a 0"]),
        ("q", ["right"]),
    ]
    pairs = [Pair("a", "find a", query, positives) for query, positives in shown]
    plan = SimpleNamespace(fingerprint="made up", read_pairs=lambda step: pairs)
    (record,) = rows("a", 1, "find a")
    told = [with_examples(plan, 0, [record], slot, InContext())[0] for slot in range(20)]
    assert {one.query_instruction for one in told} == {"find a", "q>right|find a"}
