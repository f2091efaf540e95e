"""Pairs with several scores, negatives that are copies of a row's texts, collapsed teachers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import mining_by_hand as by_hand
import numpy as np
import pytest
from made_records import made_records
from mining_step import configured, mine

from rayembed.data.engine import parts as parts_module
from rayembed.data.mining.tasks import MineParts
from rayembed.data.records import Negative, Record
from rayembed.data.vectors import embed


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("rows_per_part", [3, 1000])
def test_a_pair_with_several_scores_has_their_mean_whatever_the_order(
    rows_per_part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "ROWS_PER_PART", rows_per_part)
    given = {0: [0, 5], 1: [1], 2: [5, 5], 3: [0, 1, 4.5], 4: [2.2, 2.3, 2.2]}
    rows = [
        {"sentence1": f"one {pair}", "sentence2": f"other {pair}", "score": score}
        for pair, scores in given.items()
        for score in scores
    ]
    found = []
    rng = np.random.default_rng(0)
    for turn in range(4):
        rows = [rows[i] for i in rng.permutation(len(rows))] if turn else rows
        source = {"kind": "graded", "path": write(tmp_path / f"{turn}.jsonl", rows)}
        records, made = made_records(tmp_path / f"out {turn}", source)
        assert made.manifest["dropped"] == {"duplicate": len(rows) - 5}
        assert made.manifest["scores_averaged"] == 3, "a pair of equal scores has no other ones"
        assert (made.manifest["rows_in"], made.manifest["rows_out"]) == (len(rows), 5)
        found.append({record.query: record.similarity for record in records})
    for pair, scores in given.items():
        assert found[0][f"one {pair}"] == pytest.approx(np.mean(scores) / 5, rel=1e-6)
    assert found == [found[0]] * 4, "bit for bit"


def test_the_mean_is_that_of_all_rows_also_where_some_are_not_drawn(tmp_path: Path) -> None:
    rows = [
        {"sentence1": f"one {i % 30}", "sentence2": f"other {i % 30}", "score": 5 * (i < 30)}
        for i in range(60)
    ]
    source = {"kind": "graded", "path": write(tmp_path / "a.jsonl", rows)}
    records, made = made_records(tmp_path / "out", source, num_samples=7)
    assert [record.similarity for record in records] == [0.5] * 7
    assert made.manifest["scores_averaged"] == 7


VARIANTS = ["the  answer 3", " the answer 3\n", "THE\u00a0ANSWER 3", "\uff54he answer 3"]


def test_negatives_that_are_copies_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"query": q, "positive": positive, "negatives": negatives}
        for q, positive, negatives in (
            ("what is 3", "the answer 3", ["the answer 4", "the answer 3", *VARIANTS]),
            ("what is 4", "the answer 4", ["What is 4 ", "the answer 3"]),
            ("what is 5", ["the answer 5", "five"], ["FIVE", "four"]),
        )
    ]
    source = {"kind": "pairs", "path": write(tmp_path / "a.jsonl", rows), "negatives": "negatives"}
    records, made = made_records(tmp_path / "out", source)
    assert [[n.text for n in record.negatives] for record in records] == [
        ["the answer 4"], ["the answer 3"], ["four"]
    ]  # fmt: skip
    assert made.manifest["negatives_copied"] == len(VARIANTS) + 3
    # Records of an earlier job, which may have been made before copies were looked for.
    folder = made.folder
    again, taken = made_records(tmp_path / "again", {"kind": "records", "path": folder})
    assert [r.negatives for r in again] == [r.negatives for r in records]
    assert "negatives_copied" not in taken.manifest


@pytest.mark.parametrize("near", [None, 0.8])
@pytest.mark.parametrize("rescored", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_mining_knows_queries_and_positives_whatever_their_case_and_space(
    near, rescored, parts, tmp_path, monkeypatch
) -> None:
    task = partial(MineParts, load_cross_encoder=by_hand.load_cross_encoder)
    monkeypatch.setattr("rayembed.data.mining.mine.MineParts", task)
    asked = ["same question", "Same question", "same  question ", "SAME QUESTION"]
    rows = [
        Record(f"d/{i}", text, (f"answer of {word}",), "d")
        for i, (text, word) in enumerate(zip(asked, ("red", "green", "blue", "grey"), strict=True))
    ]
    copies = ["Same  Question", "answer  of RED", "Answer of green\n"]
    rows += [
        Record(f"d/{i}", f"another question {i}", (text,), "d")
        for i, text in enumerate([*copies, *(f"document {n} of others" for n in range(6))], 10)
    ]
    given = (Negative("ANSWER of blue"), Negative("document 0 of others"))
    rows[0] = Record("d/0", asked[0], rows[0].positives, "d", given)
    changes = {"rescoring": {"model": "reranker"}} if rescored else {}
    config = configured(rule={"kind": "top_k"}, near_duplicate=near, num_negatives=6, **changes)
    found, _ = mine(tmp_path, rows, config, parts)
    for row in found[:4]:
        texts = {" ".join(n.text.casefold().split()) for n in row.negatives}
        assert not [text for text in texts if "answer" in text or "same" in text], texts
        assert len(row.negatives) == 6


def test_signs_of_their_own_meaning_are_mined(tmp_path) -> None:
    texts = ["2³ = 8", "23 = 8", "H₂O", "H2O", "①", "1"]
    rows = [Record(f"d/{i}", f"question {i}", (text,), "d") for i, text in enumerate(texts)]
    rows.append(Record("d/x²", "x²", ("power",), "d"))
    rows.append(Record("d/x2", "x2", ("name",), "d"))
    config = configured(rule={"kind": "top_k"}, near_duplicate=None, num_negatives=7)
    found, _ = mine(tmp_path, rows, config)
    every = {*texts, "power", "name"}
    assert [{n.text for n in row.negatives} for row in found] == [
        every - set(row.positives) for row in rows
    ]


def constant(vector, *of_teacher):
    """A teacher that gives one vector, as a `TeacherLoader` loads it."""
    return lambda texts, role: np.array([vector] * len(texts), np.float32)


def test_a_teacher_that_tells_nothing_apart_is_said(tmp_path, monkeypatch, caplog) -> None:
    rows = [Record(f"d/{i}", f"query {i}", (f"document {i}",), "d") for i in range(30)]
    config = configured(rule={"kind": "top_k"})
    mine(tmp_path / "good", rows, config)
    assert "the same vector" not in caplog.text
    for number, vector in enumerate(([0.0] * 4, [0.5] * 4)):
        monkeypatch.setattr(by_hand, "load", partial(constant, vector))
        caplog.clear()
        mine(tmp_path / f"{number}", rows, config)
        assert caplog.text.count("the same vector for all of 30 different documents") == 1
    few = embed._FEWEST_DOCUMENTS - 1
    caplog.clear()
    mine(tmp_path / "few", rows[:few], config)
    assert "the same vector" not in caplog.text
