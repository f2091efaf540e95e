"""Columns that nobody reads are named; negatives that a stage asks for and nobody reads refused."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.audit import AUDIT
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.plan.audit import data_warnings, folders_of, plan_warnings
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed.data.sources.check import check_files_at_hand
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.unread import unread_columns, unread_warning
from rayembed.errors import ConfigError, DataError
from rayembed.pipeline.run.report import Outcome, print_outcome
from rayembed.pipeline.run.train import train

ROWS = [
    {
        "query": f"query {i}",
        "positive": f"positive {i}",
        "negatives": [f"negative {i} {j}" for j in range(3)],
        "score": i / 16,
    }
    for i in range(16)
]
BARE = [{name: row[name] for name in ("query", "positive")} for row in ROWS]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def make_run(folder: Path, num_negatives: int = 2, **source: Any) -> Run:
    """One stage over the data sets `brings`, whose rows bring negatives, and `mine`."""
    written(folder / "mine.jsonl", ROWS)
    given = {"kind": "pairs", "path": "mine.jsonl", "negatives": "negatives"}
    if not num_negatives:
        del given["negatives"]
    return parse(
        Run,
        {
            "name": "test",
            "model": {"kind": "biencoder", "backbone": {"path": "none"}},
            "data": {
                "root": str(folder),
                "datasets": [
                    {"name": "mine", "source": given},
                    {"name": "brings", "source": {"kind": "pairs", **source}},
                ],
            },
            "stages": [
                {
                    "name": "one",
                    "datasets": {"mine": 1, "brings": 1},
                    "batch": {
                        "global_pairs": 4,
                        "num_negatives": num_negatives,
                        "in_batch_negatives": True,
                    },
                    "optimizer": {"learning_rate": 1e-4},
                    "steps": 2,
                }
            ],
        },
    )


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_column_of_negatives_that_nobody_reads_is_refused(tmp_path: Path, ending: str) -> None:
    file = written(tmp_path / f"rows.{ending}", ROWS)
    run = make_run(tmp_path, path=file.name)
    setting = r"data\.datasets\.brings\.source\.negatives"
    with pytest.raises(ConfigError, match=rf"column 'negatives'.*set '{setting}=negatives'"):
        check_files_at_hand(run)
    with pytest.raises(ConfigError, match="column 'negatives'"):
        prepare(run, PipelineContext(str(tmp_path / "out"), 0))
    assert not (tmp_path / "out").exists()
    check_files_at_hand(override(run, ["data.datasets.brings.source.negatives=negatives"]))
    check_files_at_hand(make_run(tmp_path, 0, path=file.name))  # nobody asks for negatives
    check_files_at_hand(override(run, ["data.datasets.brings.source.negatives=[]"]))
    check_files_at_hand(make_run(tmp_path, path=written(tmp_path / f"b.{ending}", BARE).name))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_negatives_in_other_columns_are_refused_and_read_as_the_message_says(
    tmp_path: Path, ending: str
) -> None:
    split = [
        {**bare, "neg_1": row["negatives"][0], "neg_2": row["negatives"][1]}
        for bare, row in zip(BARE, ROWS, strict=True)
    ]
    run = make_run(tmp_path, path=written(tmp_path / f"several.{ending}", split).name)
    setting = "data.datasets.brings.source.negatives"
    with pytest.raises(
        ConfigError, match=rf"columns 'neg_1', 'neg_2'.*set '{setting}=\[neg_1, neg_2\]'"
    ):
        check_files_at_hand(run)
    (folder,) = prepare(
        override(run, [f"{setting}=[neg_1,neg_2]"]), PipelineContext(str(tmp_path / "out"), 0)
    ).values()
    (records,) = folders_of(BatchPlan.open(folder))["brings"]
    found = [record for part in records.parts for record in read_records(part.path)]
    read = {tuple(negative.text for negative in record.negatives) for record in found}
    assert read == {tuple(row["negatives"][:2]) for row in ROWS}
    with pytest.raises(ConfigError, match=r"source\.negatives\[1\] = 'neg_3'.*no such column"):
        prepare(
            override(run, [f"{setting}=[neg_1,neg_3]"]), PipelineContext(str(tmp_path / "no"), 0)
        )
    one = [{**row, "hard_negatives": row["negatives"][0]} for row in ROWS]
    for row in one:
        del row["negatives"]
    run = make_run(tmp_path, path=written(tmp_path / f"one.{ending}", one).name)
    with pytest.raises(ConfigError, match=rf"a column 'hard_negatives'.*set '{setting}=hard_neg"):
        check_files_at_hand(run)
    check_files_at_hand(override(run, [f"{setting}=hard_negatives"]))


NAMES = {
    "negatives": """negatives negative neg hard_negatives hardNegatives hard-negatives neg_1 Neg2
        HARD_NEGATIVES negative_passages negative_1_text neg_ctx NegativeDoc rejected""",
    "label": "label labels Label is_duplicate isDuplicate duplicate",
    "instruction": "instruction instructions prompt prompts",
    "": """id url title score neg_ids num_negatives is_negative false_negatives negative_sentiment
        negated label_score has_label rejection prompting text_neg 标签""",
}


@pytest.mark.parametrize("setting", NAMES)
def test_columns_are_known_by_plain_names(setting: str) -> None:
    for name in NAMES[setting].split():
        told = unread_warning(manifest_of({"kind": "pairs"}, name)) or ""
        assert (f"no setting reads {name!r}: " in told) == bool(setting)
        assert f"data.datasets.d.source.{setting}" in told or not setting


def test_unread_columns_are_those_at_the_top_that_no_path_begins_with(tmp_path: Path) -> None:
    names = ("neg", "topic", "label_score", "similarity", "lang", "0")
    for ending in ("jsonl", "csv", "parquet"):
        file = written(tmp_path / f"a.{ending}", [BARE[0] | dict.fromkeys(names, "some text")])
        pieces = list_pieces(str(file))
        assert unread_columns(pieces, ["query", "positive"]) == names
        read = ["query", "positive", "neg", "topic.first_line", "label_score+similarity"]
        assert unread_columns(pieces, read) == ("lang", "0")


def test_columns_that_are_read_and_that_are_not_are_logged_before_work(
    tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("INFO")
    asked = [{**row, "wrong_answer": "a text", "positve": "another"} for row in BARE]
    written(tmp_path / "rows.jsonl", asked)
    check_files_at_hand(make_run(tmp_path, path="rows.jsonl"))
    line = "brings: reading the columns query, positive; ignoring the columns wrong_answer, positve"
    assert caplog.text.count(line) == 1
    written(tmp_path / "bare.jsonl", BARE)
    caplog.clear()
    check_files_at_hand(make_run(tmp_path, path="bare.jsonl"))
    assert "brings.source reads" not in caplog.text


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("passage", "below"),
    [
        ({"docid": "17", "title": "Zoo", "text": "a wrong text"}, "title+text"),
        ({"docid": "17", "title": "", "text": "a wrong text"}, "text"),
        ({"passage": "a wrong text"}, "passage"),
    ],
)
def test_negatives_that_are_objects_are_refused_and_read_by_a_path(
    tmp_path: Path, ending: str, passage: dict[str, str], below: str
) -> None:
    """As Tevatron's files have them."""
    rows = [{**bare, "negative_passages": [passage, passage]} for bare in BARE]
    file = written(tmp_path / f"rows.{ending}", rows)
    run = make_run(tmp_path, path=file.name)
    setting = f"data.datasets.brings.source.negatives=negative_passages.{below}"
    with pytest.raises(ConfigError, match=r"a column 'negative_passages'.*negative_passages\.text"):
        check_files_at_hand(run)
    (folder,) = prepare(
        override(run, [setting]), PipelineContext(str(tmp_path / "out"), 0)
    ).values()
    (records,) = folders_of(BatchPlan.open(folder))["brings"]
    found = [record for part in records.parts for record in read_records(part.path)]
    text = " ".join(passage[name] for name in below.split("+"))
    assert {negative.text for record in found for negative in record.negatives} == {text}


def test_labels_of_pairs_are_told_with_what_leaves_the_others_out(tmp_path: Path) -> None:
    """`source.label`, of the classes of texts, would train on pairs that are none."""
    asked = [
        {"question1": f"question {i // 2}", "question2": f"{i} again", "is_duplicate": 1 - i % 2}
        for i in range(16)
    ]
    written(tmp_path / "rows.jsonl", asked)
    run = make_run(tmp_path, 0, path="rows.jsonl", query="question1", positive="question2")
    (folder,) = prepare(run, PipelineContext(str(tmp_path / "out"), 0)).values()
    (told,) = [line for line in data_warnings(folder) if "'is_duplicate'" in line]
    assert "each row is taken for a positive pair" in told
    assert "take data.datasets.brings.source.kind=nli" in told
    setting = (
        "data.datasets.brings.source={kind: nli, path: rows.jsonl, premise: question1, "
        'hypothesis: question2, label: is_duplicate, entailment: "1", contradiction: "0"}'
    )
    (folder,) = prepare(
        override(run, [setting]), PipelineContext(str(tmp_path / "as told"), 0)
    ).values()
    (records,) = folders_of(BatchPlan.open(folder))["brings"]
    found = [record for part in records.parts for record in read_records(part.path)]
    assert {(r.query, *r.positives, *(n.text for n in r.negatives)) for r in found} == {
        (f"question {i}", f"{2 * i} again", f"{2 * i + 1} again") for i in range(8)
    }
    assert [line for line in data_warnings(folder) if "'is_duplicate'" in line] == []


def test_negatives_in_a_later_file_alone_are_seen(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows/a.jsonl", BARE)
    written(tmp_path / "rows/b.jsonl", [BARE[0] | {"neg": "a text of several words"}])
    pieces = list_pieces(str(tmp_path / "rows"))
    assert unread_columns(pieces[:1], ["query", "positive"]) == ()
    assert unread_columns(pieces, ["query", "positive"]) == ("neg",)


def test_unread_columns_are_named_when_the_data_is_prepared(tmp_path: Path, caplog: Any) -> None:
    written(tmp_path / "rows.jsonl", ROWS)
    run = make_run(tmp_path, 0, path="rows.jsonl")
    (folder,) = prepare(run, PipelineContext(str(tmp_path / "out"), 0)).values()
    line = (
        "data set brings: no setting reads 'negatives': set "
        "'data.datasets.brings.source.negatives=negatives' to train on them"
    )
    assert caplog.text.count(line) == 1
    # Again where everything is there already, and for the run's summary.
    caplog.clear()
    prepare(run, PipelineContext(str(tmp_path / "out"), 0))
    assert caplog.text.count(line) == 1
    assert line in data_warnings(folder)
    (records,) = folders_of(BatchPlan.open(folder))["brings"]
    page = (Path(records.folder) / AUDIT).read_text()
    assert "Columns that no setting reads" in page
    # The control: a file without such columns.
    written(tmp_path / "mine.jsonl", BARE)
    written(tmp_path / "rows.jsonl", BARE)
    caplog.clear()
    (folder,) = prepare(run, PipelineContext(str(tmp_path / "bare"), 0)).values()
    assert "no setting reads" not in caplog.text
    assert data_warnings(folder) == []


def test_rows_short_of_negatives_are_told_when_the_data_is_prepared(
    tmp_path: Path, caplog: Any
) -> None:
    some = [row | {"negatives": row["negatives"] if i < 12 else []} for i, row in enumerate(ROWS)]
    written(tmp_path / "rows.jsonl", some)
    run = make_run(tmp_path, path="rows.jsonl", negatives="negatives")
    (folder,) = prepare(run, PipelineContext(str(tmp_path / "out"), 0)).values()
    line = "brings 4 without any and 0 with fewer of 16 rows"
    assert line in caplog.text
    assert any(line in warning for warning in data_warnings(folder))
    assert "4 none" in (Path(folder) / "audit.md").read_text()
    written(tmp_path / "rows.jsonl", ROWS)
    (folder,) = prepare(run, PipelineContext(str(tmp_path / "out"), 0)).values()
    assert not any("hard negatives" in line for line in plan_warnings(BatchPlan.open(folder)))


def test_files_at_hand_are_looked_at_before_ray_starts(tmp_path: Path, monkeypatch: Any) -> None:
    def start(_: object) -> None:
        raise InterruptedError("Ray would start")

    monkeypatch.setattr("rayembed.pipeline.run.runtime.Here.start", start)
    monkeypatch.setattr("rayembed.pipeline.run.train.check_inputs", lambda run: None)
    written(tmp_path / "rows.jsonl", ROWS)
    to_storage = f"placement.storage_path={tmp_path / 'out'}"
    run = override(make_run(tmp_path, path="rows.jsonl"), [to_storage])
    with pytest.raises(ConfigError, match="column 'negatives'"):
        train(run)
    with pytest.raises(DataError, match="there are no rows at"):
        train(override(run, ["data.datasets.brings.source.path=lost.jsonl"]))
    with pytest.raises(InterruptedError, match="Ray would start"):
        train(override(run, ["data.datasets.brings.source.negatives=negatives"]))


def test_the_summary_of_a_run_has_the_warnings(tmp_path: Path, capsys: Any) -> None:
    version: Any = SimpleNamespace(
        name="m", version=1, uri="models:/m/1", alias_uri="models:/m@candidate"
    )
    run = make_run(tmp_path, path="rows.jsonl", negatives="negatives")
    done = Outcome(run, {}, "models/one", "runs/test", version, "http://mlflow", dropped_steps=0)
    print_outcome(done, mlflow_complete=True)
    assert "Data" not in capsys.readouterr().out
    line = "stage one asks for 2 hard negatives of each query [and more]"
    print_outcome(replace(done, data_warnings=(line,)), mlflow_complete=True)
    assert f"Data       {line}" in capsys.readouterr().out


def manifest_of(source: dict[str, Any], *unread: str) -> dict[str, Any]:
    inputs = {"settings": {"source": source}}
    return {
        "dataset": "d",
        "inputs": inputs,
        "unread_columns": [{"column": name} for name in unread],
    }


def test_a_warning_names_what_to_set() -> None:
    assert unread_warning(manifest_of({"kind": "nli"}, "neg_1", "neg_2")) is None
    told = unread_warning(manifest_of({"kind": "pairs"}, "neg_1", "neg_2", "prompt", "url"))
    assert told == (
        "data set d: no setting reads 'neg_1', 'neg_2': set "
        "'data.datasets.d.source.negatives=[neg_1, neg_2]' to train on them; 'prompt': set "
        "'data.datasets.d.source.instruction=prompt' to use it"
    )
    some = {"kind": "pairs", "negatives": "neg_1", "label": "topic"}
    told = unread_warning(manifest_of(some, "neg_2", "label"))
    assert told is not None
    assert "source.negatives=[neg_1, neg_2]' to train on them" in told
    assert "label" not in told, "another column is read in its place"
    none = {"kind": "pairs", "negatives": []}  # on purpose
    assert unread_warning(manifest_of(none, "neg_2")) is None
    assert unread_warning({"dataset": "d"}) is None
