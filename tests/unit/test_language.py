"""The check of the code's English sees each fault that it is there for, and no other."""

from pathlib import Path

import language
import pytest

CLEAN = '''"""Select and cast the record columns."""

import logging

logger = logging.getLogger(__name__)


class Plan:
    """A plan on disk: what is in it was asked for by somebody."""

    def rows(self) -> int:
        """Return the number of rows. Whoever reads on is told more here."""
        logger.info("%d rows of %s", 2, self)
        return 2

    def _told(self) -> None:
        raise ValueError(f"rows = {self.rows()!r} must be " + "positive")
'''


def written(folder: Path, **files: str) -> Path:
    """A folder with Python files of these texts."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def test_plain_words_are_no_problem(tmp_path):
    assert list(language.problems(written(tmp_path, plan=CLEAN))) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '"""What is told of a model."""\n',
            "one.py:1: 'What is' in a first sentence: What is told",
        ),
        (
            '\ndef count() -> int:\n    """So many rows."""\n    return 1\n',
            "one.py:2: 'So many' in a first sentence: So many rows.",
        ),
        (
            'class Plan:\n    async def _read(self) -> None:\n        """Read it anew."""\n',
            "one.py:2: 'anew' in a first sentence: Read it anew.",
        ),
        ("def zeros_asked() -> int:\n    return 1\n", "one.py:1: 'asked' in the name zeros_asked"),
        ("class Plan:\n    def told(self) -> None: ...\n", "one.py:2: 'told' in the name told"),
    ],
)
def test_a_riddle_in_a_first_sentence_or_a_public_name(tmp_path, text, problem):
    (line,) = language.problems(written(tmp_path, one=text))
    assert line.startswith(problem)


def test_two_classes_of_one_name(tmp_path):
    plain = "class Scores: ...\nclass _Row: ...\nclass Report: ...\n"
    (line,) = language.problems(written(tmp_path, one=plain, two=f"\n{plain}"))
    assert line == "two.py:2: the class name Scores is also that of one.py:1"


def test_sentences_and_messages_are_drawn_by_the_seed(tmp_path):
    folder = written(tmp_path, plan=CLEAN, other=CLEAN)
    lines = language.drawn(1, folder, count=3)
    assert lines == language.drawn(1, folder, count=3)
    assert len(lines) == 6  # of 6 first sentences, of 4 messages
    assert set(lines[:3]) <= set(language.sentences(folder))
    assert (
        "plan.py:8 Plan: A plan on disk: what is in it was asked for by somebody."
        in language.sentences(folder)
    )
    assert sorted(language.messages(written(tmp_path, other=""))) == [
        "plan.py:13 logger.info: %d rows of %s",
        "plan.py:17 ValueError: rows = {self.rows()} must be positive",
    ]
