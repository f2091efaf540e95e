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
from rayembed.data.plan.audit import data_warnings, folders_of, negatives_warning
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
    for number, none in enumerate(
        [[1, 2], ["7187158", "d-17"], [], None, "0", " ", [{"id": "d-17", "note": "of an object"}]]
    ):
        rows = [row | {"negatives": none} for row in ROWS]
        file = written(tmp_path / f"{number}.{ending}", rows)
        check_files_at_hand(make_run(tmp_path, path=file.name))
    chinese = [row | {"negatives": "没有空格的文本"} for row in ROWS]
    with pytest.raises(ConfigError, match="column 'negatives'"):
        check_files_at_hand(
            make_run(tmp_path, path=written(tmp_path / f"zh.{ending}", chinese).name)
        )
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


def test_what_columns_look_like(tmp_path: Path) -> None:
    names = {
        "Hard Negatives": "negatives",
        "neg": "negatives",
        "negative_1": "negatives",
        "label_score": None,
        "similarity": None,
        "topic": "labels",
        "label": "labels",
        "prompt": "instructions",
        "task": "instructions",
        "neg_ids": None,
        "negated": None,
        "title": None,
        "lang": None,
    }
    file = written(tmp_path / "a.jsonl", [BARE[0] | dict.fromkeys(names, "some text")])
    pieces = list_pieces(str(file))
    found = unread_columns(pieces, ["query", "positive"])
    assert found == {name: look for name, look in names.items() if look is not None}
    read = ["query", "positive", "neg", "topic.first_line", "label_score+similarity"]
    assert unread_columns(pieces, read).keys() == found.keys() - {*("neg", "topic")}


def test_further_elements_of_lists_are_named_and_not_refused(tmp_path: Path) -> None:
    """They have no names: a text may be a wrong answer, the time of the row or its source."""
    triples = [[f"query {i}", f"positive {i}", f"a wrong text {i}", i / 2, "en"] for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, triples)))
    run = make_run(tmp_path, path="rows.jsonl", query="0", positive="1")
    check_files_at_hand(run)
    assert looks_of(tmp_path / "rows.jsonl", "0", "1") == {"2": "texts"}
    (folder,) = prepare(run, PipelineContext(str(tmp_path / "bare"), 0)).values()
    assert [line for line in data_warnings(folder) if "data set brings: no" in line] == [
        "data set brings: no setting reads '2' (looks like texts: set "
        "'data.datasets.brings.source.negatives=2' to use it, if it should be negatives)"
    ]
    # What the message names is read.
    taken = override(run, ["data.datasets.brings.source.negatives=2"])
    (folder,) = prepare(taken, PipelineContext(str(tmp_path / "out"), 0)).values()
    told = [line for line in data_warnings(folder) if "data set brings" in line]
    assert told == []
    drawn = [row for step in range(2) for row in BatchPlan.open(folder).read(step)]
    read = {n.text for row in drawn if row.dataset == "brings" for n in row.negatives}
    assert read
    assert all(text.startswith("a wrong text") for text in read)


def looks_of(path: Path, *read: str) -> dict[str, str]:
    return unread_columns(list_pieces(str(path)), read)


@pytest.mark.parametrize(
    ("values", "look"),
    [
        (["2024-01-01 12:00", "2024-01-02 09:30"], "texts"),
        ([7187158, 7187159], None),
        (["d17", "d18"], None),
        ([3, 0.25], None),
        ([1, 0], "labels of pairs"),
        ([True, False], "labels of pairs"),
        ([0, 0], None),
    ],
)
def test_elements_without_a_name_are_told_by_what_they_are(
    tmp_path: Path, values: list[Any], look: str | None
) -> None:
    rows = [[number, "a query here", "p", "a passage here"] for number in values]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert looks_of(file, "1", "3") == ({} if look is None else {"0": look})


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("column", "values", "look"),
    [
        ("rejected", [False, True], None),
        ("rejected", [False, False], None),
        ("contradiction", [0, 1], None),
        ("contradiction", [0.3, 1.0], None),
        ("negative", [17, 18], None),
        ("negative", [17.0, 18.0], None),
        ("rejected", ["a wrong answer", "another one"], "negatives"),
        ("label", [0, 1], "labels of pairs"),
        ("label", ["no", "yes"], "labels of pairs"),
        ("label", [1, 1], "labels"),
        ("label", [0, 2], "labels"),
    ],
)
def test_named_cells_are_told_by_what_they_are(
    tmp_path: Path, ending: str, column: str, values: list[Any], look: str | None
) -> None:
    rows = [{**BARE[0], column: value} for value in values]
    file = written(tmp_path / f"rows.{ending}", rows)
    assert looks_of(file, "query", "positive") == ({} if look is None else {column: look})


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("passage", "below"),
    [
        ({"docid": "17", "title": "Zoo", "text": "a wrong text"}, "title+text"),
        ({"docid": "17", "title": "", "text": "a wrong text"}, "text"),
        ({"passage": "a wrong text"}, "passage"),
    ],
)
def test_negatives_that_are_objects_are_refused_and_read_as_the_message_says(
    tmp_path: Path, ending: str, passage: dict[str, str], below: str
) -> None:
    """As Tevatron's files have them."""
    rows = [{**bare, "negative_passages": [passage, passage]} for bare in BARE]
    file = written(tmp_path / f"rows.{ending}", rows)
    run = make_run(tmp_path, path=file.name)
    column = f"negative_passages.{below}"
    setting = f"data.datasets.brings.source.negatives={column}"
    with pytest.raises(ConfigError) as refused:
        check_files_at_hand(run)
    assert f"a column '{column}'" in str(refused.value)
    assert f"set '{setting}'" in str(refused.value)
    (folder,) = prepare(
        override(run, [setting]), PipelineContext(str(tmp_path / "out"), 0)
    ).values()
    (records,) = folders_of(BatchPlan.open(folder))["brings"]
    found = [record for part in records.parts for record in read_records(part.path)]
    text = " ".join(passage[name] for name in below.split("+"))
    assert {negative.text for record in found for negative in record.negatives} == {text}
    ids = [{**bare, "negative_passages": [{"docid": "17"}]} for bare in BARE]
    file = written(tmp_path / f"ids.{ending}", ids)
    assert looks_of(file, "query", "positive") == {}


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
    assert "looks like labels of pairs: each row is taken for a positive pair, be it" in told
    assert "source.label" not in told
    setting = told.partition("set '")[2].partition("'")[0].replace("…", "rows.jsonl")
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
    bare = {"query": "what is asked", "positive": "what is said"}
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows/a.jsonl", [bare | {"neg": "d17"}])
    written(tmp_path / "rows/b.jsonl", [bare | {"neg": "a text of several words"}])
    pieces = list_pieces(str(tmp_path / "rows"))
    assert unread_columns(pieces[:1], ["query", "positive"]) == {}
    assert unread_columns(pieces, ["query", "positive"]) == {"neg": "negatives"}


def test_unread_columns_are_named_when_the_data_is_prepared(tmp_path: Path, caplog: Any) -> None:
    written(tmp_path / "rows.jsonl", ROWS)
    run = make_run(tmp_path, 0, path="rows.jsonl")
    (folder,) = prepare(run, PipelineContext(str(tmp_path / "out"), 0)).values()
    line = (
        "data set brings: no setting reads 'negatives' (looks like negatives: set "
        "'data.datasets.brings.source.negatives=negatives' to use it)"
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
    assert negatives_warning(BatchPlan.open(folder)) is None


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


def test_a_warning_without_a_setting_for_it_names_none() -> None:
    manifest = {
        "dataset": "d",
        "inputs": {"settings": {"source": {"kind": "nli"}}},
        "unread_columns": {"neg_1": "negatives", "neg_2": "negatives"},
    }
    assert unread_warning(manifest) == (
        "data set d: no setting reads 'neg_1', 'neg_2' (looks like negatives)"
    )
    manifest["inputs"] = {"settings": {"source": {"kind": "pairs"}}}
    told = unread_warning(manifest)
    assert told is not None
    assert "set 'data.datasets.d.source.negatives=[neg_1, neg_2]' to use them" in told
    source = {"kind": "pairs", "negatives": "neg_1", "label": "topic"}
    manifest["inputs"] = {"settings": {"source": source}}
    manifest["unread_columns"] = {"neg_2": "negatives", "label": "labels"}
    told = unread_warning(manifest)
    assert told is not None
    assert "source.negatives=[neg_1, neg_2]' to use it" in told
    assert "source.label reads 'topic' in place of it" in told
    source["negatives"] = []  # on purpose
    manifest["unread_columns"] = {"neg_2": "negatives"}
    assert unread_warning(manifest) is None
    assert unread_warning({"dataset": "d"}) is None
