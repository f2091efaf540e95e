"""Losses over a teacher's scores and rows without any: refused, or counted in a warning."""

import itertools
import json
from pathlib import Path
from typing import Any

import mining_by_hand as by_hand
import pytest

from rayembed.config.data_run import DataRun
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_table, write_part
from rayembed.data.plan.audit import data_warnings
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.teacher_scores import score_counts, scored_rows, teacher_scores
from rayembed.data.prepare import prepare, prepare_datasets
from rayembed.data.records import Negative, Record
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.errors import DataError

LOSSES = {
    "kl": {"kind": "listwise_kl"},
    "mse alone": {"kind": "margin_mse", "infonce_weight": 0.0},
    "masked": {"kind": "infonce", "false_negatives": {}},
}
GIVEN = {"kind": "pairs", "path": "given.jsonl", "negatives": "negatives"}
MINING = {"teacher": "t", "num_negatives": 2, "rule": {"kind": "top_k"}}
PLAIN = {"kind": "infonce"}


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> None:
    bare = [{"query": f"query {i}", "positive": f"positive {i}"} for i in range(40)]
    given = [row | {"negatives": [f"bad {i} {j}" for j in "ab"]} for i, row in enumerate(bare)]
    for name, rows in (("bare", bare), ("given", given)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def context(folder: Path) -> PipelineContext:
    return PipelineContext(
        str(folder / "out"),
        0,
        teacher_loader=TeacherLoader(by_hand.load, lambda reference: "w"),
    )


def make_run(folder: Path, loss: dict[str, Any], **datasets: dict[str, Any]) -> Run:
    batch = {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True}
    stage = {
        "name": "one",
        "datasets": dict.fromkeys(datasets, 1),
        "loss": loss,
        "batch": batch,
        "optimizer": {"learning_rate": 1e-3},
        "steps": 4,
    }
    return parse(
        Run,
        {
            "name": "test",
            "model": {"kind": "biencoder", "backbone": {"path": "none"}},
            "data": {
                "root": str(folder),
                "datasets": [{"name": name, **of} for name, of in datasets.items()],
            },
            "stages": [stage],
            "evaluation": {"benchmarks": []},
        },
    )


def earlier(folder: Path) -> dict[str, Any]:
    """Records of an earlier job with given negatives: no model scored them."""
    run = {
        "name": "earlier",
        "data": {"root": str(folder), "datasets": [{"name": "given", "source": GIVEN}]},
    }
    done = prepare_datasets(parse(DataRun, run), context(folder))["given"][-1]
    return {"kind": "records", "path": done.folder}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rows_of_which_none_has_a_score_are_refused(loss: dict[str, Any], tmp_path: Path) -> None:
    source = earlier(tmp_path)
    refused = r"none of the rows .* such scores \(0 of 32 of own\)"
    with pytest.raises(DataError, match=refused) as told:
        prepare(make_run(tmp_path, loss, own={"source": source}), context(tmp_path))
    assert "data.datasets.own.mining={teacher: …}, with pool=given" in str(told.value)
    assert [path.suffix for path in (tmp_path / "out/plans").iterdir()] == [".lock"]
    # The controls: the remedies that the message names.
    scored = {"source": source, "mining": MINING | {"pool": "given"}}
    for run in (
        make_run(tmp_path, PLAIN, own={"source": source}),
        make_run(tmp_path, loss, own=scored),
    ):
        (folder,) = prepare(run, context(tmp_path)).values()
        assert data_warnings(folder) == []


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rows_without_a_score_are_counted(
    loss: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = {
        "given": {"source": GIVEN},
        "mined": {"source": {"kind": "pairs", "path": "bare.jsonl"}, "mining": MINING},
    }
    (folder,) = prepare(make_run(tmp_path, loss, **both), context(tmp_path)).values()
    rows = [row for step in range(4) for row in BatchPlan.open(folder).read(step)]
    bare = [row for row in rows if not any(s is not None for s in teacher_scores(row)[1])]
    assert {row.dataset for row in bare} == {"given"}
    assert len(bare) == 16
    line = "not all rows have them: given 16 without any of 16 drawn"
    assert line in caplog.text
    assert any(line in warning for warning in data_warnings(folder))
    audit = (Path(folder) / "audit.md").read_text()
    assert "a teacher's scores: 0 of 16 drawn rows have them" in audit
    assert "a teacher's scores: 16 of 16 drawn rows have them" in audit
    # The controls: a loss that reads none, and rows that all have some.
    for told, datasets in ((PLAIN, both), (loss, {"mined": both["mined"]})):
        (folder,) = prepare(make_run(tmp_path, told, **datasets), context(tmp_path)).values()
        assert data_warnings(folder) == []


def test_rows_are_scored_as_steps_read_them(tmp_path: Path) -> None:
    made = []
    for i, (positive, cross) in enumerate(itertools.product((None, 0.5), repeat=2)):
        for j, scores in enumerate(itertools.product((None, 0.25), repeat=4)):
            pairs = zip(scores[::2], scores[1::2], strict=True)
            negatives = [Negative("n", score=one, cross_score=other) for one, other in pairs]
            made.append(
                Record(
                    id=f"{i}/{j}",
                    query="q",
                    positives=("p",),
                    dataset=f"d{j % 2}",
                    negatives=tuple(negatives[: j % 3]),
                    positive_score=positive,
                    positive_cross_score=cross,
                )
            )
    table = read_table(write_part(str(tmp_path), made).path)
    wanted, counts = [], {name: {"scored": 0, "unscored": 0} for name in ("d0", "d1")}
    for record in made:
        positive, negatives = teacher_scores(record)
        scored = positive is not None and any(n is not None for n in negatives)
        wanted.append(scored)
        if record.negatives:
            counts[record.dataset]["scored" if scored else "unscored"] += 1
    assert scored_rows(table).tolist() == wanted
    assert score_counts(table) == counts
    assert min(counts["d0"].values()) > 0
