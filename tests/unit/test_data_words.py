"""Words in scripts with marks, joiners and without spaces."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.sources.file_rows import record_of
from rayembed.data.words import (
    _WORD,
    normalised,
    normalised_hash,
    same_text_form,
    without_copies,
    words,
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Two  WORDS, one_two!", ["two", "words", "one_two"]),
        ("किताब पढ़ना", ["किताब", "पढ़ना"]),
        ("புத்தகம் படி", ["புத்தகம்", "படி"]),
        ("שָׁלוֹם עולם", ["שָׁלוֹם", "עולם"]),
        ("كِتَابٌ جديد", ["كِتَابٌ", "جديد"]),
        ("نمی\u200cخواهم", ["نمی\u200cخواهم"]),
        ("क्\u200dष है", ["क्\u200dष", "है"]),
        ("我们, ok读", ["我", "们", "ok", "读"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("❤\ufe0f 👩\u200d👩", ["❤\ufe0f 👩\u200d👩"]),
        ("a ❤\ufe0f b", ["a", "b"]),
    ],
)
def test_marks_belong_to_words_and_stand_for_none(text, wanted) -> None:
    normal = [unicodedata.normalize("NFKC", word) for word in wanted]
    assert words(text) == normal


def test_the_same_signs_in_another_order_are_another_word() -> None:
    assert sorted("किताब") == sorted("कातिब")
    assert words("किताब") != words("कातिब")
    assert words("किताब") != words("कातिबु")


ONE = [
    ("What is  3", " what is 3\n"),
    ("ＡＢＣ１２３", "abc123"),
    ("ｶﾞｲﾄﾞ", "ガイド"),
    ("a\u3000b\u00a0c", "A b C"),
    ("ol\u00e9", "OLE\u0301"),
    ("STRASSE", "straße"),
]
OTHERS = [
    ("2³ = 8", "23 = 8"),
    ("x²", "x2"),
    ("H₂O", "H2O"),
    ("①", "1"),
    ("½", "1⁄2"),
    ("5 ㎏", "5 kg"),
    ("C++", "C"),
    ("resume", "résumé"),
]


@pytest.mark.parametrize(("first", "second"), ONE)
def test_case_width_and_space_make_no_other_text(first, second) -> None:
    assert same_text_form(first) == same_text_form(second)
    assert normalised_hash(first) == normalised_hash(second)
    assert without_copies(["other", first], [second]) == ["other"]


@pytest.mark.parametrize(("first", "second"), OTHERS)
def test_signs_with_a_meaning_of_their_own_make_another_text(first, second) -> None:
    assert normalised_hash(first) != normalised_hash(second)
    source = {"kind": "pairs", "path": "p", "query": "q", "positive": "p"}
    dataset = parse(DatasetConfig, {"name": "d", "source": source})
    made = record_of(dataset, "which?", [first], [second], origin=("f",))
    assert [negative.text for negative in made.negatives] == [second]
    assert made.negatives_copied == 0


@given(st.text(st.characters(max_codepoint=127)))
def test_words_of_ascii_are_those_of_all_texts(text):
    whole = normalised(text)
    assert words(text) == (_WORD.findall(whole) or [whole])
