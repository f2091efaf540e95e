"""Words in scripts with marks, joiners and without spaces."""

import unicodedata

import pytest

from rayembed.data.words import words


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
