"""Prompts and placeholders: the value sets of NV-Embed, every place filled, stable by seed."""

import re
from collections import Counter

import pytest

from rayembed_extras.synthesis.prompts import (
    VALUES,
    draw,
    draw_language,
    example_prompt,
    least_words,
    prompts_fingerprint,
    task_prompt,
)
from rayembed_extras.synthesis.requests import REQUESTS_PER_GROUP, ExampleRequest, TaskRequest

# Typed from the paper, not from the code.
TABLE_15 = {
    "query_type": {"extremely long-tail", "long-tail", "common"},
    "query_length": {"less than 5 words", "5 to 15 words", "at least 10 words"},
    "difficulty": {"high school", "college", "PhD"},
    "clarity": {"clear", "understandable with some effort", "ambiguous"},
    "num_words": {"50", "100", "200", "300", "400", "500"},
}
TABLE_16 = {
    "num_words": {"less than 10", "at least 10", "at least 50", "at least 100", "at least 200"},
    "difficulty": {"high school", "college", "PhD"},
    "clarity": {"clear", "understandable with some effort", "ambiguous"},
}
FIELDS = {
    "short-long": [
        "user_query",
        "positive_document",
        "hard_negative_document1",
        "hard_negative_document2",
    ],
    "long-short": ["input_text", "label", "misleading_label"],
    "short-short": ["input", "positive", "hard_negative"],
}
KINDS = list(FIELDS)


def test_the_sets_are_those_of_the_tables() -> None:
    sets = {kind: {n: set(v) for n, v in VALUES[kind].items()} for kind in KINDS}
    assert sets["short-long"] == TABLE_15
    assert sets["long-short"] == TABLE_16
    assert sets["short-short"] == {
        name: TABLE_15[name] for name in TABLE_15.keys() & TABLE_16.keys() - {"num_words"}
    }


@pytest.mark.parametrize("kind", KINDS)
def test_all_values_are_drawn_alike_and_independently(kind) -> None:
    drawn = [draw(kind, 0, number) for number in range(6000)]
    for name, values in VALUES[kind].items():
        counts = Counter(d[name] for d in drawn)
        assert set(counts) == set(values)
        expected = len(drawn) / len(values)
        assert all(abs(count - expected) < 0.12 * expected for count in counts.values())
    pairs = Counter((d["difficulty"], d["clarity"]) for d in drawn)
    assert len(pairs) == 9
    assert max(pairs.values()) < 1.25 * min(pairs.values())


def test_draws_are_stable_and_change_with_seed_and_number() -> None:
    # Written down once: they must be the same on all machines and in all versions.
    assert [draw("long-short", 7, i)["num_words"] for i in range(4)] == [
        "less than 10",
        "at least 10",
        "less than 10",
        "at least 50",
    ]
    assert [draw("short-long", 0, i) for i in range(20)] != [
        draw("short-long", 1, i) for i in range(20)
    ]


def test_languages_are_drawn_whatever_their_order() -> None:
    codes = [
        draw_language({"en": "English", "fr": "French"}, "short-long", 0, i) for i in range(99)
    ]
    again = [
        draw_language({"fr": "French", "en": "English"}, "short-long", 0, i) for i in range(99)
    ]
    assert codes == again
    assert 30 < codes.count("fr") < 70


@pytest.mark.parametrize("kind", KINDS)
def test_every_placeholder_is_filled_and_every_field_named(kind) -> None:
    for number in range(200):
        values = draw(kind, 0, number)
        prompt = example_prompt(kind, "THE TASK", values, "Swahili")
        for value in (*values.values(), "THE TASK", "Swahili"):
            assert value in prompt
        assert re.findall(r'^- "(\w+)":', prompt, re.MULTILINE) == FIELDS[kind]
        assert not re.search(r"[{}]|None", prompt)
    assert len({example_prompt(kind, "t", draw(kind, 0, i)) for i in range(200)}) >= 9


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_for_tasks(kind) -> None:
    prompt = task_prompt(kind, 37)
    assert "37" in prompt
    assert not re.search(r"[{}]|None", prompt)
    assert "subject: " not in prompt
    assert "subject: pumps" in task_prompt(kind, 37, "pumps")
    assert len({task_prompt(other, 37) for other in KINDS}) == 3


def test_a_task_that_looks_like_a_placeholder_stays_as_it_is() -> None:
    task = "Given {query_type} and {0} and %s, find {task!r}"
    assert task in example_prompt("short-long", task, draw("short-long", 0, 0))


def test_words_asked_for() -> None:
    assert least_words("short-long", {"num_words": "300"}) == 300
    assert least_words("long-short", {"num_words": "at least 200"}) == 200
    assert least_words("long-short", {"num_words": "less than 10"}) == 0
    assert least_words("short-short", {}) == 0


def test_requests_are_named_and_told_apart_by_their_content() -> None:
    first = ExampleRequest("short-long", 5, 0, "a task")
    again = ExampleRequest("short-long", 5, 0, "a task", attempt=1)
    assert (first.id, again.id) == ("short-long/examples/5#0", "short-long/examples/5#1")
    assert first.prompt == again.prompt
    assert first.sampling_seed != again.sampling_seed
    requests = [
        first,
        again,
        ExampleRequest("short-long", 5, 0, "another task"),
        ExampleRequest("short-long", 5, 1, "a task"),
        ExampleRequest("short-long", 6, 0, "a task"),
        ExampleRequest("short-long", 5, 0, "a task", language="French"),
        ExampleRequest("short-short", 5, 0, "a task"),
        TaskRequest("short-long", 5, 0, 40),
        TaskRequest("short-long", 5, 0, 40, "pumps"),
        TaskRequest("short-long", 5, 0, 41),
    ]
    assert len({request.key for request in requests}) == len(requests)
    assert ExampleRequest("short-long", 5, 0, "a task").key == first.key
    assert all(0 <= request.sampling_seed < 2**31 for request in requests)
    last = ExampleRequest("short-long", REQUESTS_PER_GROUP - 1, 0, "a task")
    next_ = ExampleRequest("short-long", REQUESTS_PER_GROUP, 0, "a task")
    assert last.group == first.group != next_.group
    assert TaskRequest("short-long", 5, 0, 40).group != first.group


def test_the_fingerprint_of_prompts_follows_their_wording(monkeypatch) -> None:
    before = {kind: prompts_fingerprint(kind) for kind in KINDS}
    assert len(set(before.values())) == 3
    changed = {**VALUES, "long-short": {**VALUES["long-short"], "clarity": ("clear",)}}
    monkeypatch.setattr("rayembed_extras.synthesis.prompts.VALUES", changed)
    after = {kind: prompts_fingerprint(kind) for kind in KINDS}
    assert {kind for kind in KINDS if after[kind] != before[kind]} == {"long-short"}
