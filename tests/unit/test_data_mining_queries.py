"""Rows that ask the same: one query with the positives of all."""

from functools import partial

import mining_by_hand as by_hand
import numpy as np
import pytest
from mining_step import configured, mine, pipeline_context, prepared, told

from rayembed.data.engine.parts import read_records
from rayembed.data.mining import candidates as selection
from rayembed.data.mining.corpus import CorpusFiles, open_corpus
from rayembed.data.mining.queries import queries_of
from rayembed.data.mining.tasks import MineParts
from rayembed.data.records import Negative, Record
from rayembed.data.vectors.embed import embed_parts


def test_a_given_negative_that_is_a_positive_of_another_row_goes(tmp_path) -> None:
    rows = [
        Record("1", "q", ("p",), "d", (Negative("s"), Negative("x"))),
        Record("2", "q", ("s",), "d"),
        Record("3", "r", ("t",), "d", (Negative("s"),)),
    ]
    config = configured(rule={"kind": "top_k"}, num_negatives=1)
    for parts in (1, 3):
        found, manifest = mine(tmp_path, rows, config, parts)
        assert [[n.text for n in r.negatives] for r in (found[0], found[2])] == [["x"], ["s"]]
        assert manifest["refused"]["given, but a positive"] == 1


@pytest.mark.parametrize("rescoring", [None, {"model": "reranker"}], ids=["teacher", "reranker"])
def test_a_query_of_too_many_positives_shares_none(rescoring, tmp_path, monkeypatch) -> None:
    rows = by_hand.made_up_rows(40, 7, labels=True, given=True)
    config = configured(
        rule={"kind": "top_k"}, near_duplicate=0.5, rescoring=rescoring, num_negatives=30
    )
    task = partial(MineParts, load_cross_encoder=by_hand.load_cross_encoder)
    monkeypatch.setattr("rayembed.data.mining.mine.MineParts", task)
    wanted = []
    for most in (1000, 2):
        monkeypatch.setattr("rayembed.data.mining.corpus.MOST_SHARED", most)
        monkeypatch.setattr("rayembed.data.mining.mine.MOST_SHARED", most)
        open_corpus.cache_clear()
        wanted.append(by_hand.mined(rows, config, most_shared=most))
        vague = sum(
            by_hand.positives_of(r, rows, most) != by_hand.positives_of(r, rows)
            or (len(r.positives) > most and sum(o.query == r.query for o in rows) > 1)
            for r in rows
        )
        for parts in (1, 3):
            found, manifest = mine(tmp_path / str(parts), rows, config, parts)
            assert told(found) == wanted[-1]
            assert manifest["vague"] == vague
    assert wanted[0] != wanted[1]
    assert vague > 5
    open_corpus.cache_clear()


def test_rows_that_ask_the_same_are_worked_on_once(tmp_path, monkeypatch) -> None:
    """A thousand titles "Untitled" cost a thousand times what one does, and no million times."""
    count = 1000
    texts = [f"{word} {place}" for place in range(100) for word in by_hand.WORDS]
    rows = [Record(f"{i}", "Untitled", (text,), "d") for i, text in enumerate(texts)]
    rows += [Record(f"r{i}", f"q {i}", (f"other {i} of it",), "d") for i in range(20)]
    before = prepared(tmp_path, rows, 2)
    files = CorpusFiles(
        tuple(before.parts),
        (),
        embed_parts(pipeline_context(tmp_path), "d", before.parts, configured()),
    )
    corpus = open_corpus(files)
    for part in before.parts:
        records = read_records(part.path)
        queries = queries_of(records, corpus)
        distinct = len({r.query for r in records})
        assert len(queries.first_row) == distinct
        assert len(queries.positive) == count + distinct - 1
        assert len(queries.of_row) == len(records)
    compared, scored = [0], [0]
    usual = selection.trigrams

    def counted(text):
        compared[0] += 1
        return usual(text)

    def load(config, weights, device):
        def score(pairs):
            scored[0] += len(pairs)
            return np.array([by_hand.cross_score(*pair) for pair in pairs], dtype=np.float32)

        return score

    monkeypatch.setattr(selection, "trigrams", counted)
    monkeypatch.setattr(
        "rayembed.data.mining.mine.MineParts", partial(MineParts, load_cross_encoder=load)
    )
    found, _ = mine(tmp_path, rows, configured(rule={"kind": "top_k"}, candidates=20), 2)
    assert all(r.negatives for r in found[count:])
    assert compared[0] < 10 * len(rows)
    mine(
        tmp_path,
        rows,
        configured(rule={"kind": "top_k"}, candidates=20, rescoring={"model": "reranker"}),
        2,
    )
    assert len(rows) <= scored[0] < 4 * len(rows)
