"""The command `rayembed index`: its dry run, its work, its messages and exit codes."""

import json

import pytest
from made_up_index import documents, write
from tiny_folders import save_biencoder

from rayembed.jobs.table import JOBS
from rayembed_extras.indexing.estimate import estimate
from rayembed_extras.indexing.job import run_index_job


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_biencoder(tmp_path / "tiny")
    write(tmp_path / "docs.jsonl", documents(30))
    return ["--documents", "docs.jsonl", "--model", "tiny", "--name", "docs"]


def test_the_command_builds_updates_and_refuses(asked, tmp_path, capsys):
    more = ["--set", "documents.metadata=[year]", "--to", "store", "--set", "rows_per_part=8"]
    index = JOBS.get("index")
    assert index([*asked, *more]) == 0
    out = capsys.readouterr().out
    assert "index docs: 30 rows in parquet at" in out
    assert (tmp_path / "store/docs_1/part-000003.parquet").is_file()
    assert index([*asked, *more]) == 2
    assert "add --update" in capsys.readouterr().err
    write(tmp_path / "docs.jsonl", documents(31))
    assert index([*asked, *more, "--update"]) == 0
    assert "1 documents written, 0 deleted" in capsys.readouterr().out


def test_a_dry_run_estimates_and_writes_nothing(asked, tmp_path, capsys):
    before = {path.name for path in tmp_path.iterdir()}
    more = ["--dry-run", "--price-per-hour", "3.6", "--texts-per-second", "10"]
    assert run_index_job([*asked, *more, "--store", "parquet"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# index docs\nname: docs\n")
    assert "10 texts/s, as stated" in shown.err
    assert "0:00:03" in shown.err
    assert "0.00 at 3.60 an hour" in shown.err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_missing_options_are_named(asked, capsys):
    assert run_index_job(asked[2:]) == 2
    assert "--documents is required" in capsys.readouterr().err
    assert run_index_job(asked[:2] + asked[4:]) == 2
    assert "--model is required" in capsys.readouterr().err
    assert run_index_job(asked[:4]) == 2
    assert "--name is required" in capsys.readouterr().err
    assert run_index_job([*asked, "--store", "lanze"]) == 2
    assert "did you mean 'lance'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_an_estimate_from_the_first_rows_is_near(ending, asked, tmp_path):
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    rows = documents(20_000)
    path = tmp_path / f"many.{ending}"
    table = pa.Table.from_pylist([{"id": row["id"], "text": row["text"]} for row in rows])
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif ending == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path)
    run = run_index_job.read(
        run_index_job.arguments(
            ["--documents", str(path), *asked[2:], "--set", "model.dtype=float32"]
        )
    )
    found = estimate(run, 100.0)
    number, texts, tokens = found.sample.in_all
    assert number == texts == pytest.approx(20_000, rel=0.35)
    assert tokens > texts
    assert found.seconds == pytest.approx(texts / 100)
    assert found.vector_bytes == texts * 32 * 4
    measured = estimate(run)
    assert measured.texts_per_second > 10
    assert measured.measured.startswith("measured here (cpu")
