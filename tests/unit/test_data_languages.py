"""Language of texts by frequent words, and their script."""

import pytest

from rayembed.data.languages import ENGLISH, language_of, script_of


def test_few_frequent_words_make_no_language_sure():
    assert language_of(["the ship"]) == ENGLISH
    assert language_of(["the ship"], 2) == ""
    assert language_of(["where is the ship"], 2) == ENGLISH
    assert language_of(["où est le bateau de la ville"], 2) == "fra-Latn"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Übermäßig 2", "latin"),
        ("кошка спит (cat)", "cyrillic"),
        ("漢字とカタカナ", "cjk"),
        ("고양이", "hangul"),
        ("12 + 3 = ?", ""),
        ("", ""),
    ],
)
def test_script_of_most_letters(text, script):
    assert script_of(text) == script
