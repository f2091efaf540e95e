"""Graded similarity and teachers' scores: from the rows into the step, and only where asked for."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mining_by_hand as by_hand
import numpy as np
import pytest
from made_records import made_records
from mining_step import configured, mine
from tiny_models import save_cross_encoder
from toy_model import ToyTokenizer

from rayembed.config.override import override
from rayembed.config.settings import changed
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import Part, read_records, read_table, write_part
from rayembed.data.mining.tasks import MineParts
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.order import PlanConfig, columns_for
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.plan.write import write_plan
from rayembed.data.prepare import prepare
from rayembed.data.records import Negative, Record
from rayembed.errors import ConfigError, DataError
from rayembed.losses.infonce import InfoNCE
from rayembed.recipes.catalogue import get_recipe

GRADED = [
    {"sentence1": "a", "sentence2": "b", "score": 5},
    {"sentence1": "c", "sentence2": "d", "score": "2.5"},
    {"sentence1": "e", "sentence2": "f", "score": 0.0},
    {"sentence1": "g", "sentence2": "h", "score": 5.1},
    {"sentence1": "i", "sentence2": None, "score": 1},
]


def graded_file(folder: Path) -> dict[str, Any]:
    path = folder / "graded.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GRADED))
    return {"kind": "graded", "path": str(path), "max_rejected_share": 0.4}


def record(i: int, **values: Any) -> Record:
    return Record(f"d/{i}", f"query {i}", (f"positive {i}",), "d", **values)


def negatives(*scores: tuple[float | None, float | None]) -> tuple[Negative, ...]:
    return tuple(
        Negative(f"negative {i}", score=score, cross_score=crossed)
        for i, (score, crossed) in enumerate(scores)
    )


def test_every_graded_pair_is_a_record_with_its_similarity(tmp_path) -> None:
    records, made = made_records(tmp_path / "out", graded_file(tmp_path))
    assert [(r.query, r.positives, r.similarity) for r in records] == [
        ("a", ("b",), 1.0),
        ("c", ("d",), 0.5),
        ("e", ("f",), 0.0),
    ]
    assert made.manifest["rejected"] == {
        "a sentence is missing or empty": 1,
        "the score is outside of 0 to 5": 1,
    }
    wide, _ = made_records(tmp_path / "out", graded_file(tmp_path) | {"lowest": -6, "highest": 10})
    assert [r.similarity for r in wide] == pytest.approx([11 / 16, 8.5 / 16, 6 / 16, 11.1 / 16])
    with pytest.raises(ConfigError, match="lowest 5 must be below highest 5"):
        made_records(tmp_path / "out", graded_file(tmp_path) | {"lowest": 5})


def test_records_of_an_earlier_job_keep_their_similarity(tmp_path) -> None:
    before, made = made_records(tmp_path / "out", graded_file(tmp_path))
    after, _ = made_records(tmp_path / "again", {"kind": "records", "path": made.folder})
    assert [r.similarity for r in after] == [r.similarity for r in before] == [1.0, 0.5, 0.0]


def test_a_part_has_the_column_only_where_a_row_has_a_value(tmp_path) -> None:
    plain = write_part(str(tmp_path), [record(0), record(1)])
    graded = write_part(str(tmp_path), [record(2), record(3, similarity=0.25)])
    assert "similarity" not in read_table(plain.path).column_names
    assert "similarity" in read_table(graded.path).column_names
    assert "positive_cross_score" not in read_table(graded.path).column_names
    assert [r.similarity for r in read_records(graded.path)] == [None, 0.25]


def parts(folder: Path, similarity: bool) -> dict[str, list[Part]]:
    """Twelve rows in four parts, of which the last half may be graded."""
    rows = [record(i, similarity=i / 16 if similarity and i >= 6 else None) for i in range(12)]
    return {"d": [write_part(str(folder), rows[i : i + 3]) for i in range(0, 12, 3)]}


def plan_of(folder: Path, similarity: bool, **changes: Any) -> BatchPlan:
    config = PlanConfig({"d": 1.0}, 4, 0, 3, 0, True, **changes)
    return write_plan(str(folder / "plan"), parts(folder / "parts", similarity), config)


def test_a_plan_carries_the_column_only_where_the_loss_asks_for_it(tmp_path) -> None:
    plain = plan_of(tmp_path / "plain", False)
    unasked = plan_of(tmp_path / "unasked", True)
    asked = plan_of(tmp_path / "asked", True, columns=("similarity",))
    absent = plan_of(tmp_path / "absent", False, columns=("similarity",))
    assert unasked.fingerprint == plain.fingerprint != asked.fingerprint
    for name in ("steps-000000000.parquet",):
        files = [(Path(plan.folder) / name).read_bytes() for plan in (plain, unasked)]
        assert files[0] == files[1]
    assert plain.manifest["columns"] == []
    rows = [r for step in range(3) for r in asked.read(step, 1, 2)]
    assert rows
    for r in rows:
        i = int(r.id.partition("/")[2])
        assert r.similarity == (i / 16 if i >= 6 else None)
    ids = [[r.id for r in plan.read(1)] for plan in (plain, unasked, asked, absent)]
    assert ids[0] == ids[1] == ids[2] == ids[3]
    assert all(r.similarity is None for r in absent.read(0))


def test_rows_without_any_negative_learn_from_each_other_by_their_similarity(tmp_path) -> None:
    made = parts(tmp_path / "parts", True)
    config = PlanConfig({"d": 1.0}, 4, 0, 3, 0, in_batch_negatives=False)
    with pytest.raises(DataError, match="could learn nothing"):
        write_plan(str(tmp_path / "a"), made, config)
    plan = write_plan(str(tmp_path / "b"), made, replace(config, columns=("similarity",)))
    assert len({r.id for step in range(3) for r in plan.read(step)}) == 12


def test_a_step_has_similarities_and_scores_of_one_model_a_row() -> None:
    rows = [
        record(0, similarity=0.25),
        record(1, positive_score=0.75, negatives=negatives((0.5, None), (None, None))),
        record(
            2,
            positive_score=0.75,
            positive_cross_score=0.875,
            negatives=negatives((0.5, 0.125), (0.25, None), (0.0, 0.0)),
        ),
        # Without the cross-encoder's score of the positive its others compare with nothing.
        record(3, positive_score=0.5, negatives=negatives((0.25, 0.125))),
    ]
    batch = make_step_batch(0, rows, 2, ToyTokenizer())
    nan = np.nan
    np.testing.assert_array_equal(batch.similarity, np.float32([0.25, nan, nan, nan]))
    np.testing.assert_array_equal(batch.positive_score, np.float32([nan, 0.75, 0.875, 0.5]))
    np.testing.assert_array_equal(
        batch.negative_score,
        np.float32([[nan, nan], [0.5, nan], [0.125, nan], [0.25, nan]]),
    )
    assert {a.dtype for a in (batch.similarity, batch.positive_score, batch.negative_score)} == {
        np.dtype(np.float32)
    }
    assert make_step_batch(0, rows, 0, ToyTokenizer()).negative_score.shape == (4, 0)


def test_the_cross_encoders_score_of_the_positive_is_kept(tmp_path) -> None:
    folder = str(save_cross_encoder(tmp_path / "reranker"))
    rows = by_hand.made_up_rows(8, 3)
    rule = {"kind": "top_k_perc_pos", "max_relative_score": 0.9}
    config = configured(rescoring={"model": folder, "max_length": 24}, rule=rule)
    found, manifest = mine(tmp_path, rows, config)
    shown = {e["query"]: e["positive_score"] for e in manifest["mining_examples"]}
    for record in found:
        assert record.positive_cross_score is not None
        lowest = shown[record.query]  # of the query's positives, by which the rule goes
        assert lowest <= record.positive_cross_score + 1e-4
        if len(by_hand.positives_of(record, rows)) == 1:
            assert record.positive_cross_score == pytest.approx(lowest, abs=1e-4)
        limit = 0.9 * record.positive_cross_score
        assert all(n.cross_score <= limit + 1e-6 for n in record.negatives)
        assert record.positive_cross_score != record.positive_score
    plain, _ = mine(tmp_path / "plain", rows, configured())
    assert {r.positive_cross_score for r in plain} == {None}


@pytest.mark.parametrize("rescoring", [None, {"model": "reranker"}], ids=["teacher", "reranker"])
def test_a_step_has_the_score_of_the_positive_whose_text_it_trains(
    rescoring: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other positives of the query, of the row and of others, set the rule's limit alone."""
    task = partial(MineParts, load_cross_encoder=by_hand.load_cross_encoder)
    monkeypatch.setattr("rayembed.data.mining.mine.MineParts", task)

    def score(query: str, text: str) -> float:
        if rescoring is not None:
            return by_hand.as_float32(by_hand.cross_score(query, text))
        return float(np.prod(by_hand.vectors_of([query, text]), axis=0).sum())

    rows = by_hand.made_up_rows(40, 5)
    rule = {"kind": "top_k_margin_pos", "margin": 0.0}
    found, _ = mine(tmp_path, rows, configured(rule=rule, rescoring=rescoring))
    batch = make_step_batch(0, found, 4, ToyTokenizer())
    wanted = [score(r.query, r.positives[0]) for r in found]
    assert batch.positive_score.tolist() == wanted
    lowest = [min(score(r.query, p) for p in by_hand.positives_of(r, rows)) for r in found]
    assert np.mean(np.array(wanted) > lowest) > 0.3, "otherwise nothing is tested"
    above = batch.negative_score > np.array(lowest)[:, None]
    assert not above.any()


def test_columns_are_those_that_the_loss_needs(monkeypatch) -> None:
    loss = InfoNCE()
    assert columns_for(loss) == ()
    monkeypatch.setattr(InfoNCE, "needs", frozenset({"teacher_scores"}), raising=False)
    assert columns_for(loss) == ("positive_cross_score",)


def test_a_loss_and_its_data_fit_each_other(monkeypatch) -> None:
    recipe = override(get_recipe("biencoder"), ["evaluation.guard=null"])
    pairs = "data.datasets.pairs"
    graded = [f"{pairs}.source={{kind: graded, path: graded.jsonl}}", f"{pairs}.held_out=null"]
    mined = [f"{pairs}.mining={{teacher: one}}", "stages.finetune.batch.num_negatives=7"]
    with pytest.raises(ConfigError, match="would treat all as positives"):
        override(recipe, graded)
    with pytest.raises(ConfigError, match="mining treats every pair as a query"):
        override(recipe, [*graded, *mined])
    with pytest.raises(ConfigError, match="held_out does not support the source kind 'classes'"):
        override(recipe, [f"{pairs}.source={{kind: classes, path: x.jsonl}}"])
    monkeypatch.setattr(InfoNCE, "needs", frozenset({"similarity"}), raising=False)
    assert override(recipe, graded).data.datasets[0].source.kind == "graded"
    with pytest.raises(
        ConfigError, match=r"none of its data sets .* has graded pairs; to read sentence pairs"
    ):
        override(recipe, ["stages.finetune.steps=2000"])
    monkeypatch.setattr(InfoNCE, "needs", frozenset({"teacher_scores"}), raising=False)
    assert override(recipe, mined).data.datasets[0].mining is not None
    with pytest.raises(ConfigError, match="the stage uses no hard negatives; set batch"):
        override(recipe, ["stages.finetune.steps=2000"])
    given = [f"{pairs}.source.negatives=negatives", *mined[1:]]
    with pytest.raises(ConfigError, match="learns from a teacher's scores"):
        override(recipe, given)
    with pytest.raises(ConfigError, match="come from several teachers"):
        override(recipe, [*mined, f"{pairs}.mining.further_teachers=[{{teacher: other}}]"])


@pytest.mark.parametrize(
    ("loss", "teacher", "words"),
    [
        ("infonce", {}, "would treat all as positives"),
        ("infonce", {"clusters": {"teacher": "nowhere", "batch_pairs": 4}}, "clusters=null"),
    ],
)
def test_graded_records_of_an_earlier_job_are_no_positives(
    loss: str, teacher: dict[str, object], words: str, tmp_path: Path
) -> None:
    source = graded_file(tmp_path)
    _, earlier = made_records(tmp_path / "storage", source)
    dataset = {"name": "own", "source": {"kind": "records", "path": earlier.folder}, **teacher}
    run = changed(
        override(get_recipe("biencoder"), ["evaluation.guard=null"]),
        data={"datasets": [dataset]},
        stages=[
            {
                "name": "s",
                "datasets": {"own": 1},
                "batch": {"global_pairs": 4, "in_batch_negatives": True},
                "loss": {"kind": loss},
                "optimizer": {"learning_rate": 1e-3},
                "steps": 2,
            }
        ],
    )
    with pytest.raises(DataError, match=words):
        prepare(run, PipelineContext(str(tmp_path / "storage"), 0))
