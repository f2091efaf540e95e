"""Measurement of what a store returns (`rayembed index-scores`), against plain computations."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from index_engines import layout_of, stored, unit_vectors

from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.jobs.table import JOBS
from rayembed_extras.indexing import store_scores
from rayembed_extras.indexing.judged_queries import find_queries
from rayembed_extras.indexing.manifest import (
    MadeBy,
    Manifest,
    TableRecord,
    changed_table,
    read_manifest,
    write_manifest,
)
from rayembed_extras.indexing.scores_job import run_scores_job, settings_in
from rayembed_extras.indexing.settings import STORES
from rayembed_extras.indexing.store import VECTOR, Layout
from rayembed_extras.indexing.store_scores import AS_BUILT, ScoresRequest, measure
from rayembed_extras.indexing.stores.lance import LanceTables

D, N = 32, 400


def make_index(
    folder: Path, kind: str, *, number_type: str = "float32", pieces: int = 1
) -> tuple[str, np.ndarray, list[str]]:
    """Make an index of N random vectors with a record; returns storage, vectors and ids."""
    storage, to = str(folder / "outputs"), str(folder / "store")
    vectors = unit_vectors(np.random.default_rng(0), N, D)
    scale = layout_of(number_type, dimensions=D).scale
    layout = Layout(D, number_type, {}, has_text=True, scale=scale)  # type: ignore[arg-type]
    ids = [f"d{n // pieces}#{n % pieces}" if pieces > 1 else f"d{n}" for n in range(N)]
    values = stored(vectors, layout)
    rows = pa.table(
        {
            "id": ids,
            "document": [name.partition("#")[0] for name in ids],
            "chunk": np.arange(N, dtype=np.int32) % pieces,
            "text": [f"text {n}" for n in range(N)],
            VECTOR: pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1]),
        },
        schema=layout.schema,
    )
    kept = {"kind": kind, "to": to, "number_type": number_type}
    store = parse(STORES.classes()[kind], kept).open()  # type: ignore[attr-defined]
    store.create("docs_1", layout)
    store.upsert("docs_1", rows)
    store.finish("docs_1", layout)
    store.point("docs", "docs_1")
    store.close()
    made_by = MadeBy(
        reference="none",
        weights="none",
        instruction=None,
        dimensions=D,
        dtype="float32",
        number_type=number_type,
        scale=scale,
    )
    record = TableRecord(
        table="docs_1", made_by=made_by, documents={"store_text": True}, parts=1, complete=True
    )
    tables = {"docs_1": record}
    write_manifest(storage, Manifest(name="docs", store=kept, current="docs_1", tables=tables))
    return storage, vectors, ids


def judged(folder: Path, grades: list[dict[str, int]]) -> Any:
    """Files of judged queries in BEIR's layout."""
    (folder / "qrels").mkdir(parents=True)
    lines = [json.dumps({"_id": f"q{n}", "text": f"query {n}"}) for n in range(len(grades))]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    rows = [f"q{n}\t{name}\t{grade}" for n, of in enumerate(grades) for name, grade in of.items()]
    head = "query-id\tcorpus-id\tscore"
    (folder / "qrels/test.tsv").write_text("\n".join([head, *rows]) + "\n")
    return find_queries(str(folder), "test")


def plain_recall(queries: np.ndarray, exact: np.ndarray, vectors: np.ndarray, k: int) -> float:
    """Recall of exact search in other vectors, without ties."""
    asked = np.argsort(-(queries @ vectors.T), axis=1)[:, :k]
    right = np.argsort(-(queries @ exact.T), axis=1)[:, :k]
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(asked, right, strict=True)]))


@pytest.mark.parametrize("kind", ["lance", "faiss", "parquet"])
def test_rows_of_the_index_as_queries(kind: str, tmp_path: Path) -> None:
    storage, _, _ = make_index(tmp_path, kind)
    report = measure(ScoresRequest(storage, "docs", sample=50), None)
    exact, as_built = report.scores
    assert (report.rows, report.queries, report.judged) == (N, 50, False)
    assert (exact.index, exact.recall, exact.recall_of_table) == ("exact search", 1.0, 1.0)
    assert (as_built.index, as_built.number_type) == (AS_BUILT, "float32")
    assert as_built.recall == as_built.recall_of_table == 1.0
    assert as_built.ndcg is None
    assert as_built.milliseconds is not None
    assert as_built.slow_milliseconds is not None
    assert 0 < as_built.milliseconds <= as_built.slow_milliseconds


def test_copies_by_number_type_index_and_search(tmp_path: Path, monkeypatch: Any) -> None:
    storage, vectors, ids = make_index(tmp_path, "faiss")
    queries = unit_vectors(np.random.default_rng(1), 40, D)
    monkeypatch.setattr(store_scores, "query_vectors", lambda *_: queries)
    nearest = np.argsort(-(queries @ vectors.T), axis=1)
    grades = [{ids[row[0]]: 2, ids[row[3]]: 1, "gone": 1} for row in nearest]
    request = ScoresRequest(
        storage,
        "docs",
        number_types=("float32", "int8", "bits"),
        indexes=({},),
        searches=({},),
        k=5,
    )
    report = measure(request, judged(tmp_path / "judged", grades))
    rows = {(row.number_type, row.index): row for row in report.scores}
    assert len(rows) == 3 + 1 + 3
    layouts = {name: layout_of(name, dimensions=D) for name in ("int8", "bits")}
    codes = stored(vectors, layouts["int8"]).astype(np.float32)
    expected = plain_recall(queries, vectors, codes, 5)
    found = rows["int8", "none"]
    assert found.recall == 1.0
    assert found.recall_of_table == pytest.approx(expected, abs=0.005)
    assert rows["bits", "none"].recall == 1.0
    assert rows["bits", "none"].recall_of_table < 0.8 < rows["int8", "none"].recall_of_table
    # nDCG by hand: grades 2 at place 1 and 1 at place 4, ideal 2, 1, 1.
    ideal = 2 + 1 / np.log2(3) + 1 / 2
    assert rows["float32", AS_BUILT].ndcg == pytest.approx((2 + 1 / np.log2(5)) / ideal)
    assert rows["float32", AS_BUILT].judged_recall == pytest.approx(2 / 3)
    assert rows["float32", "exact search"].ndcg == rows["float32", "none"].ndcg
    bytes_of = {name: rows[name, "none"].bytes_a_row or 0 for name in ("float32", "int8", "bits")}
    assert bytes_of["float32"] > bytes_of["int8"] > bytes_of["bits"] > 0
    store = parse(STORES.classes()["faiss"], {"kind": "faiss", "to": str(tmp_path / "store")})
    assert store.open().tables("docs_trial") == []  # type: ignore[attr-defined]
    assert store.open().count("docs_1") == N  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "index", "option"),
    [
        ("faiss", {"factory": "IVF16,Flat"}, "nprobe"),
        ("lance", {"index_type": "IVF_FLAT", "num_partitions": 16}, "nprobes"),
    ],
)
def test_an_approximate_index_and_its_searches(
    kind: str, index: Any, option: str, tmp_path: Path
) -> None:
    storage, _, _ = make_index(tmp_path, kind)
    searches: Any = tuple({option: count} for count in (1, 4, 16))
    request = ScoresRequest(storage, "docs", indexes=(index,), searches=searches, sample=60)
    _, as_built, *copies = measure(request, None).scores
    assert (as_built.search, as_built.recall) == ("", 1.0)
    assert [row.search for row in copies] == [f"{option}={count}" for count in (1, 4, 16)]
    assert copies[0].recall < copies[1].recall < copies[2].recall == 1.0
    with pytest.raises(ConfigError, match="probings"):
        measure(ScoresRequest(storage, "docs", searches=({"probings": 1},)), None)


def test_documents_in_several_pieces_count_once(tmp_path: Path, monkeypatch: Any) -> None:
    storage, vectors, ids = make_index(tmp_path, "parquet", pieces=4)
    queries = vectors[:20] + 0.0
    monkeypatch.setattr(store_scores, "query_vectors", lambda *_: queries)
    files = judged(tmp_path / "judged", [{ids[n].partition("#")[0]: 1} for n in range(20)])
    report = measure(ScoresRequest(storage, "docs", k=3), files)
    assert [row.ndcg for row in report.scores] == [1.0, 1.0]
    assert [row.recall for row in report.scores] == [1.0, 1.0]


def test_what_cannot_be_measured_is_refused_before_work(tmp_path: Path) -> None:
    storage, _, _ = make_index(tmp_path, "faiss", number_type="int8")
    with pytest.raises(ConfigError, match="stores int8, of which no float32"):
        measure(ScoresRequest(storage, "docs", number_types=("float32",)), None)
    with pytest.raises(ConfigError, match="IVF7"):
        measure(ScoresRequest(storage, "docs", indexes=({"factory": "IVF7,X"},)), None)
    with pytest.raises(ConfigError, match="no finished index 'other'"):
        measure(ScoresRequest(storage, "other"), None)
    assert len(measure(ScoresRequest(storage, "docs", number_types=("bits",)), None).scores) == 4


def test_only_the_copy_that_a_killed_job_left_is_removed(tmp_path: Path, monkeypatch: Any) -> None:
    storage, _, _ = make_index(tmp_path, "lance")
    store: Any = parse(STORES.classes()["lance"], {"kind": "lance", "to": str(tmp_path / "store")})
    store.open().create("docs_trial_1", Layout(7, "float32", {}))  # an index that is being built
    plain = LanceTables.drop
    request = ScoresRequest(storage, "docs", number_types=("float16",), sample=5)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LanceTables, "drop", killed)
        with pytest.raises(KeyboardInterrupt):
            measure(request, None)
    assert store.open().tables("docs_trial") == ["docs_trial_1", "docs_trial_2"]
    dropped = []

    def noted(self: LanceTables, table: str) -> None:
        dropped.append(table)
        plain(self, table)

    monkeypatch.setattr(LanceTables, "drop", noted)
    measure(request, None)
    measure(request, None)
    assert dropped == ["docs_trial_2"] * 3
    assert store.open().tables("docs_trial") == ["docs_trial_1"]
    store.open().point("docs_trial", "docs_trial_1")
    with pytest.raises(ConfigError, match="another index has the name docs_trial; measure without"):
        measure(request, None)


def test_a_model_of_the_registry_is_looked_up_in_the_storage(
    tmp_path: Path, monkeypatch: Any
) -> None:
    storage, vectors, _ = make_index(tmp_path, "parquet")
    manifest = read_manifest(storage, "docs")
    assert manifest is not None
    made_by = manifest.tables["docs_1"].made_by.model_copy(update={"reference": "models:/tiny/1"})
    write_manifest(storage, changed_table(manifest, "docs_1", made_by=made_by))
    looked_up = []

    def queries(*given: Any) -> np.ndarray:
        looked_up.append(given[-1])
        return vectors[:1]

    monkeypatch.setattr(store_scores, "query_vectors", queries)
    files = judged(tmp_path / "judged", [{"d0": 1}])
    measure(ScoresRequest(storage, "docs"), files)
    measure(ScoresRequest(storage, "docs", tracking_uri="http://mlflow:5000/"), files)
    assert looked_up == [f"sqlite:///{storage}/mlflow.db", "http://mlflow:5000"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("none", {}),
        ("factory=IVF64,Flat", {"factory": "IVF64,Flat"}),
        ("factory=IVF64,PQ8,train_rows=100", {"factory": "IVF64,PQ8", "train_rows": 100}),
        ("{hnsw_config: {m: 4}}", {"hnsw_config": {"m": 4}}),
        ("use_index=false", {"use_index": False}),
    ],
)
def test_settings_are_read(text: str, values: Any) -> None:
    assert settings_in(text, "--index") == values


def test_the_command_measures_an_index_that_a_model_made(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from made_up_index import documents, write
    from tiny_folders import save_biencoder

    monkeypatch.chdir(tmp_path)
    save_biencoder(tmp_path / "tiny")
    rows = documents(60)
    write(tmp_path / "docs.jsonl", rows)
    build = ["--documents", "docs.jsonl", "--model", "tiny", "--name", "docs", "--store", "lance"]
    assert JOBS.get("index")([*build, "--to", "store"]) == 0
    pairs = [{"query": row["text"], "positive": row["text"]} for row in rows[:20]]
    write(tmp_path / "pairs.jsonl", pairs)
    capsys.readouterr()
    asked = ["--name", "docs", "--queries", "pairs.jsonl", "--number-type", "bits"]
    assert JOBS.get("index-scores")([*asked, "--index", "none", "--k", "5"]) == 0
    out = capsys.readouterr().out
    assert "docs in lance: 60 rows, 20 judged queries" in out
    folder = tmp_path / "outputs/indexes/docs/scores"
    assert (folder / "store_scores.png").read_bytes()[:4] == b"\x89PNG"
    with (folder / "store_scores.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["number type"], line["index"]) for line in lines] == [
        ("float32", "exact search"),
        ("bits", "exact search"),
        ("float32", AS_BUILT),
        ("bits", "none"),
    ]
    assert 0 < float(lines[0]["nDCG@5"]) == pytest.approx(float(lines[2]["nDCG@5"]))
    assert run_scores_job(["--name", "docs", "--search", "nprobes"]) == 2
    assert "--search 'nprobes' must be name=value" in capsys.readouterr().err
    assert run_scores_job(["--name", "docs", "--number-type", "int4"]) == 2
    assert "int4" in capsys.readouterr().err
    assert run_scores_job(["--name", "docs", "--queries", "nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err
