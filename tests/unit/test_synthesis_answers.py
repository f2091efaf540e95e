"""Answers of all sorts: what can be read is read, all else is refused, each with its reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayembed.data.engine.parts import write_part
from rayembed.data.records import Record
from rayembed_extras.synthesis.answers import (
    RejectedAnswer,
    count_words,
    in_script_of,
    normalised,
    read_pair,
    read_tasks,
)
from rayembed_extras.synthesis.requests import ChatAnswer

EXAMPLE = {
    "user_query": "why do rivers meander",
    "positive_document": "Water on the outer bank of a bend is faster and takes soil away.",
    "hard_negative_document1": "Rivers carry water from mountains to the sea.",
    "hard_negative_document2": "Glaciers move because of their own weight.",
}
SHORT = {"input": "a dog", "positive": "a hound", "hard_negative": "a cat"}
LABELLED = {"input_text": "It broke after a day.", "label": "bad", "misleading_label": "good"}


def answer(text: str, cut_off: bool = False) -> ChatAnswer:
    return ChatAnswer("id", "group", "key", "answered", text, cut_off=cut_off)


def pair_of(text: str, kind="short-long", **more):
    return read_pair(kind, answer(text), **more)


def reason_of(text: str, kind="short-long", **more) -> str:
    with pytest.raises(RejectedAnswer) as told:
        read_pair(kind, answer(text), **more)
    return str(told.value)


PLAIN = json.dumps(EXAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        f"\n\n  {PLAIN}\n",
        json.dumps(EXAMPLE, indent=2),
        f"```json\n{PLAIN}\n```",
        f"```\n{PLAIN}\n```\nI hope that this helps!",
        f"```json\n{PLAIN}",
        f"Sure, here is an example {{as asked}}:\n{PLAIN}\nThe query is long-tail.",
        f"<think>It must have {{four}} fields: {json.dumps(SHORT)}</think>{PLAIN}",
        PLAIN.replace("_", r"\_"),
        json.dumps(EXAMPLE | {"explanation": "it is relevant", "difficulty": 3}),
        json.dumps({"example": EXAMPLE}),
        json.dumps([EXAMPLE]),
        f"{json.dumps(SHORT)}\n{PLAIN}",
        json.dumps({name: f"  {text}\n" for name, text in EXAMPLE.items()}),
    ],
    ids=["plain", "spaces", "indented", "fenced", "explained", "open fence", "braces", "thoughts",
         "markdown", "more fields", "nested", "in a list", "second object", "padded"],
)  # fmt: skip
def test_forms_of_an_answer(text: str) -> None:
    pair = pair_of(text)
    assert (pair.query, pair.positive, *pair.negatives) == tuple(EXAMPLE.values())


def test_line_breaks_within_strings_are_kept() -> None:
    text = PLAIN.replace("faster and", "faster\nand")
    assert "\n" in text
    assert pair_of(text).positive == EXAMPLE["positive_document"].replace(" and", "\nand")


def test_an_escaped_backslash_before_an_underscore_stays() -> None:
    example = SHORT | {"input": r"what is a\_b in TeX"}
    assert read_pair("short-short", answer(json.dumps(example))).query == example["input"]


def test_pairs_of_the_other_kinds() -> None:
    pair = pair_of(json.dumps(SHORT), "short-short")
    assert (pair.query, pair.positive, pair.negatives) == ("a dog", "a hound", ("a cat",))
    pair = pair_of(json.dumps(LABELLED), "long-short")
    assert (pair.positive, pair.negatives) == ("bad", ("good",))


def without(name: str) -> str:
    return json.dumps({k: v for k, v in EXAMPLE.items() if k != name})


def with_(**texts) -> str:
    return json.dumps(EXAMPLE | texts)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON of the form asked for"),
        ("I cannot help with that.", "not JSON of the form asked for"),
        (PLAIN[:-1], "not JSON of the form asked for"),
        (PLAIN[:80], "not JSON of the form asked for"),
        ("[1, 2]", "not JSON of the form asked for"),
        (without("user_query"), "user_query is missing"),
        (without("hard_negative_document2"), "hard_negative_document2 is missing"),
        (json.dumps(SHORT), "user_query is missing"),
        (with_(user_query=None), "user_query is not a text"),
        (with_(user_query=7), "user_query is not a text"),
        (with_(positive_document=["a", "b"]), "positive_document is not a text"),
        (with_(hard_negative_document1={"text": "a"}), "hard_negative_document1 is not a text"),
        (with_(user_query=""), "no query"),
        (with_(user_query=" \n"), "no query"),
        (with_(user_query="\u200b"), "query has no visible character"),
        (with_(positive_document=""), "no positive"),
        (with_(positive_document=EXAMPLE["user_query"]), "positive equals query"),
        (with_(positive_document="Why do rivers meander?"), "positive equals query"),
        (with_(hard_negative_document1=""), "negative is empty or equals query"),
        (with_(hard_negative_document2=EXAMPLE["user_query"]), "negative is empty or equals query"),
        (
            with_(hard_negative_document1=EXAMPLE["positive_document"].upper()),
            "negative equals positive",
        ),
        (with_(user_query="\ud800 half a character"), "user_query is not valid Unicode"),
        (with_(hard_negative_document1="\udfff"), "hard_negative_document1 is not valid Unicode"),
    ],
)  # fmt: skip
def test_reasons_of_refusal(text: str, reason: str) -> None:
    assert reason_of(text) == reason


def test_an_answer_at_the_limit_of_tokens_is_told_apart() -> None:
    with pytest.raises(RejectedAnswer, match="cut off at max_tokens"):
        read_pair("short-long", answer(PLAIN[:80], cut_off=True))
    assert read_pair("short-long", answer(PLAIN, cut_off=True)).query == EXAMPLE["user_query"]


def test_lengths_count_for_the_long_texts_of_each_kind() -> None:
    assert (
        reason_of(PLAIN, least_words=8) == "a text has too few words"
    )  # the negatives have 8 and 7 words
    assert pair_of(PLAIN, least_words=7)
    assert (
        reason_of(json.dumps(LABELLED), "long-short", least_words=6) == "a text has too few words"
    )
    assert pair_of(json.dumps(LABELLED), "long-short", least_words=5)


def test_the_script_of_the_language() -> None:
    russian = {"input": "собака", "positive": "пёс", "hard_negative": "кошка"}
    assert pair_of(json.dumps(russian), "short-short", language="ru")
    told = "a text is not in the script of its language"
    assert reason_of(json.dumps(russian), "short-short", language="en") == told
    assert reason_of(json.dumps(SHORT), "short-short", language="ru") == told
    assert in_script_of("zh-Hans", "北京 is 首都")
    assert not in_script_of("ja", "only Latin letters here")
    assert in_script_of("ja", "東京タワーとひらがな")
    assert in_script_of("xx", "anything")
    assert in_script_of("en", "12 + 30 = 42")
    assert in_script_of("pt_BR", "ação e reação")


TASKS = ["Given a claim, retrieve its proof", "Given a song, retrieve its notes"]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TASKS),
        f"Here are two:\n```json\n{json.dumps(TASKS, indent=1)}\n```",
        json.dumps({"tasks": TASKS}),
        json.dumps([*TASKS, 7, None, {"task": "x"}, "", "one", "word " * 80, "\ud800 half of it"]),
        f"As in the examples [1], [2]: {json.dumps(TASKS)}",
        json.dumps([task.replace(" ", "  \n") for task in TASKS]),
    ],
    ids=["plain", "fenced", "object", "some unusable", "other lists", "spaces"],
)
def test_lists_of_tasks(text: str) -> None:
    assert read_tasks(answer(text)) == TASKS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1. Given a claim", "not JSON of the form asked for"),
        ("[]", "the answer's list has no task"),
        ('["one", "two"]', "the answer's list has no task"),
        (json.dumps({"tasks": "none"}), "not JSON of the form asked for"),
    ],
)
def test_answers_without_tasks(text: str, reason: str) -> None:
    with pytest.raises(RejectedAnswer, match=reason):
        read_tasks(answer(text))


HOSTILE = {
    "deep lists": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "many openings": "{ [ " * 100_000,
    "large number": '{"user_query": ' + "9" * 100_000 + "}",
    "not a number": with_(score=float("nan")),
    "a name many times": '{"user_query": 1, ' * 1000 + "}",
    "fences": "```json\n" * 20_000,
    "thoughts without end": "<think>" * 50_000,
    "backslashes": "{" + "\\" * 100_000 + "_",
    "controls": "\x00\x1b[2J{\x07}",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(20)
def test_hostile_answers_are_refused_in_time(name: str) -> None:
    if name != "not a number":
        assert reason_of(HOSTILE[name])
        with pytest.raises(RejectedAnswer):
            read_tasks(answer(HOSTILE[name]))


def pair_or_reason(text: str):
    try:
        return read_pair("short-short", answer(text))
    except RejectedAnswer as reason:
        return str(reason)


@given(st.text() | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(list(SHORT)), inner, max_size=3),
    max_leaves=12,
).map(json.dumps))  # fmt: skip
def test_whatever_is_answered_is_a_storable_pair_or_refused(tmp_path_factory, text: str) -> None:
    pair = pair_or_reason(text)
    if isinstance(pair, str):
        assert pair
        return
    record = Record("id", pair.query, (pair.positive,), "made")
    assert write_part(str(tmp_path_factory.getbasetemp() / "parts"), [record]).rows == 1


@given(
    st.fixed_dictionaries({name: st.text(min_size=1) for name in SHORT}),
    st.sampled_from(["{}", "```json\n{}\n```", "Sure: {} Done.", "<think>hm</think>{}"]),
)
def test_a_good_example_is_read_in_every_wrapping(example, wrapping: str) -> None:
    text = wrapping.replace("{}", json.dumps(example))
    pair = pair_or_reason(text)
    if isinstance(pair, str):
        assert "JSON" not in pair
        assert "missing" not in pair
        return
    found = [text.strip() for text in (pair.query, pair.positive, *pair.negatives)]
    assert found == [example[name].strip() for name in SHORT]


def test_words_and_normal_forms() -> None:
    assert count_words("Two words, and three more!") == 5
    assert count_words("東京タワー") == 5
    assert count_words("") == 0
    assert normalised("  A Ｆull—width, TEXT! ") == normalised("a full width text")
    assert normalised("straße") == normalised("STRASSE")
