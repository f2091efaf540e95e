"""Every kind of source becomes records; no row is lost, and each record leads back to its rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_records import made_records

from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part
from rayembed.data.hashes import NO_HASH, label_hash, text_hash
from rayembed.data.records import Record
from rayembed.data.sources import files
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import Row, read_rows
from rayembed.data.sources.tasks import HeldOut
from rayembed.errors import ConfigError, DataError


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row_at(folder: Path, origin: str) -> dict[str, Any]:
    """The very row of the source, read without our reader."""
    if "@" in origin:
        name, _, place = origin.partition("@")
        content = (folder / name).read_bytes()[int(place) :]
        return json.loads(content.partition(b"\n")[0])
    name, _, number = origin.partition("#")
    return pq.read_table(folder / name).to_pylist()[int(number)]


def balanced(manifest: Any) -> bool:
    used = manifest["rows_in"] - sum(manifest["rejected"].values())
    made = manifest["rows_out"] + sum(manifest["dropped"].values())
    return used >= 0 and made == manifest["records_made"]


def test_patterns_folders_and_names_of_origins(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl", "deep/er/train-9.jsonl"):
        write_jsonl(tmp_path / "in" / name, [{"query": name, "positive": "p"}])
    whole = str(tmp_path / "in")

    def names(path: str) -> list[str]:
        return [piece.name for piece in list_pieces(path)]

    assert names(f"{whole}/train-*.jsonl") == ["train-0.jsonl", "train-1.jsonl"]
    assert names(f"{whole}/*/er/*") == ["deep/er/train-9.jsonl"]
    assert names(f"{whole}/**/train-*") == [
        "deep/er/train-9.jsonl",
        "train-0.jsonl",
        "train-1.jsonl",
    ]
    assert names(whole)[0] == "deep/er/train-9.jsonl"
    assert names(f"{whole}/test-0.jsonl") == ["test-0.jsonl"]
    with pytest.raises(
        DataError, match=r"no file matches the pattern; the folder contains .*test-0.jsonl"
    ):
        list_pieces(f"{whole}/dev-*.jsonl")
    with pytest.raises(DataError, match=r"no such file, and the folder .*nowhere' is not there"):
        list_pieces(f"{tmp_path}/nowhere/*.jsonl")


def test_rows_do_not_depend_on_where_the_data_lies(tmp_path: Path) -> None:
    rows = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(5)]
    for folder in ("here", "there/deeper"):
        write_jsonl(tmp_path / folder / "a.jsonl", rows)
    source = {"kind": "pairs", "path": "*.jsonl"}
    here, made = made_records(tmp_path / "out1", source, root=tmp_path / "here")
    there, again = made_records(tmp_path / "out2", source, root=tmp_path / "there" / "deeper")
    assert here == there
    assert made.fingerprint == again.fingerprint


def test_parquet_reads_only_the_columns_that_are_named(tmp_path: Path, monkeypatch) -> None:
    table = pa.table(
        {
            "big": [b"x" * 10] * 6,
            "data": [{"q": f"q {i}", "p": [{"t": "T", "x": f"p {i}"}]} for i in range(6)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 1)
    pieces = list_pieces(str(tmp_path / "a.parquet"))
    assert [(piece.start, piece.first_row) for piece in pieces] == [(0, 0), (1, 2), (2, 4)]
    rows = [row for piece in pieces for row in read_rows(piece, ["data.q"])]
    assert [row.origin for row in rows] == [f"a.parquet#{i}" for i in range(6)]
    assert set(rows[0].values) == {"data"}
    source = {"kind": "pairs", "path": str(tmp_path), "query": "data.q", "positive": "data.p.t+x"}
    records, _ = made_records(tmp_path / "out", source)
    assert records[3].positives == ("T p 3",)
    assert len([row for row in read_rows(pieces[0], ["nothing"]) if isinstance(row, Row)]) == 2


def test_tsv_has_no_quotes_and_lists_have_numbered_columns(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('query\tpositive\n"open\tp 1\nq\t"p\n')
    records, _ = made_records(tmp_path / "out", {"kind": "pairs", "path": str(tmp_path / "a.tsv")})
    assert [(r.query, r.positives[0]) for r in records] == [('"open', "p 1"), ("q", '"p')]
    assert [r.origin for r in records] == [("a.tsv#0",), ("a.tsv#1",)]
    write_jsonl(tmp_path / "b.jsonl", [["q", "p", "n"], {"set": ["a", "b", "c"]}])
    source = {"kind": "pairs", "path": str(tmp_path / "b.jsonl"), "query": "0", "positive": "1"}
    (record,), _ = made_records(
        tmp_path / "out", source | {"negatives": "2", "max_rejected_share": 0.5}
    )
    assert (record.query, record.positives, record.negatives[0].text) == ("q", ("p",), "n")
    sets = {"query": "set.0", "positive": "set", "max_rejected_share": 0.5}
    (record,), _ = made_records(tmp_path / "out", source | sets)
    assert (record.query, record.positives) == ("a", ("b", "c"))


def test_missing_columns_name_what_stands_beside_them(tmp_path: Path) -> None:
    rows = [{"query": "q", "answers": [], "label": 1}, {"query": "q", "answers": [{"txt": "a"}]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    source = {"kind": "pairs", "path": str(tmp_path / "a.jsonl")}
    with pytest.raises(ConfigError, match=r"'answers.text'.*did you mean 'txt'"):
        made_records(tmp_path / "o", source | {"positive": "answers.text"})
    with pytest.raises(ConfigError, match=r"source.positive = 'answer'.*did you mean 'answers'"):
        made_records(tmp_path / "o", source | {"positive": "answer"})
    with pytest.raises(ConfigError, match=r"source.language = 'lang'"):
        made_records(tmp_path / "o", source | {"positive": "answers.txt", "language": "lang"})


def test_both_directions_ask_for_each_other(tmp_path: Path) -> None:
    rows = [
        {"de": "eins", "en": ["one", "a"], "neg": ["two"], "lang": "de-en", "class": 3},
        {"de": "one", "en": ["eins"], "neg": [], "lang": "de-en", "class": 3},
        {"de": "zwei", "en": [], "neg": [], "lang": None, "class": None},
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    source = {
        "kind": "pairs",
        "path": str(tmp_path / "a.jsonl"),
        "query": "de",
        "positive": "en",
        "negatives": "neg",
        "language": "lang",
        "label": "class",
        "max_rejected_share": 0.4,
    }
    records, made = made_records(tmp_path / "out", source | {"both_directions": True})
    found = [(r.query, r.positives, tuple(n.text for n in r.negatives)) for r in records]
    assert found == [
        ("eins", ("one", "a"), ("two",)),
        ("one", ("eins",), ()),
        ("a", ("eins",), ()),
        ("eins", ("one",), ()),
    ]
    assert len({r.id for r in records}) == 4
    assert {r.origin for r in records[:3]} == {("a.jsonl@0",)}, "the first of two equal rows stays"
    assert {(r.language, r.label) for r in records} == {("de-en", "3")}
    assert made.manifest["dropped"] == {"duplicate": 1}
    assert made.manifest["rejected"] == {"no positive": 1}
    assert balanced(made.manifest)
    assert made.manifest["rows_in"] == 3
    one_way, _ = made_records(tmp_path / "out", source)
    assert [r.query for r in one_way] == ["eins", "one"]


def test_wrong_types_are_rejected_row_by_row_with_the_reason(tmp_path: Path) -> None:
    good = [{"query": f"q {i}", "positive": "p", "lang": "en"} for i in range(6)]
    bad: list[Any] = [
        {"query": "q", "positive": {"a": 1}},
        {"query": "q", "positive": [1]},
        {"query": ["q"], "positive": "p"},
        {"query": "q", "positive": "p", "lang": ["en"]},
        {"positive": "p"},
    ]
    write_jsonl(tmp_path / "a.jsonl", good + bad)
    source = {"kind": "pairs", "path": str(tmp_path / "a.jsonl"), "language": "lang"}
    with pytest.raises(
        DataError,
        match=r"5 of 11 rows .*the allowed share 0\.4\. .*max_rejected_share to 0\.46.*\n.*neither",
    ):
        made_records(tmp_path / "out", source | {"max_rejected_share": 0.4})
    records, made = made_records(tmp_path / "out", source | {"max_rejected_share": 0.5})
    assert len(records) == 6
    assert made.manifest["rejected"] == {
        "column 'lang' is not a text": 1,
        "column 'positive' is neither a text nor a list of texts": 2,
        "column 'query' is not a text": 1,
        "no query": 1,
    }
    assert len(made.manifest["examples"]) == 5


def test_sentences_that_are_similar_enough_ask_for_each_other(tmp_path: Path) -> None:
    rows = [
        {"sentence1": "a", "sentence2": "b", "score": 4.0},
        {"sentence1": "c", "sentence2": "d", "score": "4.5"},
        {"sentence1": "e", "sentence2": "f", "score": 3.9},
        {"sentence1": "g", "sentence2": "h", "score": 0},
        {"sentence1": "i", "sentence2": "j", "score": "none"},
        {"sentence1": "k", "sentence2": None, "score": 5},
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    source = {"kind": "sts", "path": str(tmp_path / "a.jsonl"), "max_rejected_share": 0.34}
    records, made = made_records(tmp_path / "out", source)
    assert [(r.query, *r.positives) for r in records] == [
        ("a", "b"),
        ("b", "a"),
        ("c", "d"),
        ("d", "c"),
    ]
    assert made.manifest["rejected"] == {
        "column 'score' is not a number": 1,
        "a sentence is missing or empty": 1,
        "not similar": 2,
    }, "two of six are bad, two more are only not similar"
    with pytest.raises(DataError, match="2 of 6 rows"):
        made_records(tmp_path / "out", source | {"max_rejected_share": 0.33})


def nli_rows() -> list[dict[str, Any]]:
    rows = []
    for p in range(40):
        for h in range(4):
            label = (p + h) % 3 if p % 5 else 1
            rows.append({"premise": f"premise {p}", "hypothesis": f"h {p} {h}", "label": label})
    rows.sort(key=lambda row: row["hypothesis"][::-1])  # the rows of a premise stand far apart
    rows.append({"premise": "premise 1", "hypothesis": "unsure", "label": -1})
    return rows


def brute_force_nli(rows: list[dict[str, Any]]) -> dict[str, tuple[set[str], set[str]]]:
    found: dict[str, tuple[set[str], set[str]]] = {}
    for premise in {row["premise"] for row in rows}:
        own = [row for row in rows if row["premise"] == premise]
        entailed = {row["hypothesis"] for row in own if row["label"] == 0}
        against = {row["hypothesis"] for row in own if row["label"] == 2}
        if entailed:
            found[premise] = entailed, against
    return found


def test_rows_of_a_premise_come_together_from_all_files(tmp_path: Path) -> None:
    rows = nli_rows()
    for number in range(3):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", rows[number::3])
    source = {"kind": "nli", "path": str(tmp_path / "in")}
    records, made = made_records(tmp_path / "out", source)
    wanted = brute_force_nli(rows)
    assert {r.query: (set(r.positives), {n.text for n in r.negatives}) for r in records} == wanted
    assert {n.rule for r in records for n in r.negatives} == {"given"}
    assert made.manifest["rows_in"] == len(rows)
    assert made.manifest["rejected"] == {
        "premise without entailment": sum(row["premise"] not in wanted for row in rows)
    }
    for record in records:
        told = [row_at(tmp_path / "in", origin) for origin in record.origin]
        assert {row["premise"] for row in told} == {record.query}
        assert len(told) == sum(row["premise"] == record.query for row in rows)
    assert not (Path(made.folder) / "working").exists()


@pytest.mark.parametrize("buckets", [1, 7])
def test_names_of_relations_and_bad_rows_of_inference(
    buckets: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(
        "rayembed.data.engine.shuffle.number_of_buckets", lambda size, least=0: buckets
    )
    rows: list[Any] = [
        {"s1": "p", "s2": "yes", "gold": "entailment", "lang": "en"},
        {"s1": "p", "s2": "no", "gold": "contradiction", "lang": "en"},
        {"s1": "p", "s2": "p", "gold": "entailment", "lang": "en"},
        {"s1": "same", "s2": "same", "gold": "entailment", "lang": "en"},
        {"s1": "held", "s2": "out", "gold": "entailment", "lang": "en"},
        {"s1": "", "s2": "x", "gold": "entailment", "lang": "en"},
        {"s1": "p", "s2": ["x"], "gold": "entailment", "lang": "en"},
        {"s1": "p", "s2": "several", "gold": ["a", "b"], "lang": "en"},
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (record,), made = made_records(
        tmp_path / "out",
        {
            "kind": "nli",
            "path": str(tmp_path / "a.jsonl"),
            "premise": "s1",
            "hypothesis": "s2",
            "label": "gold",
            "entailment": "entailment",
            "contradiction": "contradiction",
            "language": "lang",
            "max_rejected_share": 0.5,
        },
        held_out=HeldOut(texts=frozenset([text_hash("out")])),
    )
    assert (record.positives, record.negatives[0].text) == (("yes",), "no")
    assert record.language == "en"
    assert made.manifest["rejected"] == {
        "column 'gold' contains a list, not one value": 1,
        "column 's2' is not a text": 1,
        "has a held-out text": 1,
        "no premise": 1,
        "positive equals query": 1,
    }
    assert made.manifest["rows_in"] == 8


def test_records_of_an_earlier_job_keep_their_provenance(tmp_path: Path) -> None:
    rows = [{"query": f"q {i}", "positive": f"p {i}", "neg": ["n"]} for i in range(5)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    first, made = made_records(
        tmp_path / "out",
        {"kind": "pairs", "path": str(tmp_path / "a.jsonl"), "negatives": "neg"},
        query_instruction="Find",
        in_batch_negatives=False,
        task="sts",
    )
    source = {"kind": "records", "path": made.folder}
    again, taken = made_records(
        tmp_path / "new",
        source,
        name="later",
        document_instruction="Read",
        held_out=HeldOut(texts=frozenset([text_hash("p 2")])),
    )
    assert [r.id for r in again] == [r.id for r in first if r.query != "q 2"]
    assert {r.dataset for r in again} == {"later"}
    for old, new in zip([r for r in first if r.query != "q 2"], again, strict=True):
        assert (new.origin, new.negatives, new.task) == (old.origin, old.negatives, old.task)
        assert (new.query_instruction, new.document_instruction) == ("Find", "Read")
        assert not new.in_batch
    assert taken.manifest["rejected"] == {"has a held-out text": 1}
    with pytest.raises(DataError, match=r"source.path = .*has no manifest.json"):
        made_records(tmp_path / "new", {"kind": "records", "path": str(tmp_path / "none")})


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    """One source of each kind of files."""
    pairs = [{"query": f"q {i}", "positive": [f"p {i}", f"p {i} b"]} for i in range(60)]
    sts = [{"sentence1": f"a {i}", "sentence2": f"b {i}", "score": i % 6} for i in range(60)]
    classes = [{"text": f"text {i}", "label": i % 4} for i in range(60)]
    tables = {"pairs": pairs, "nli": nli_rows(), "sts": sts, "classes": classes}
    for name, rows in tables.items():
        write_jsonl(folder / name / "a.jsonl", rows)
        table = folder / f"{name}-table"
        table.mkdir()
        pq.write_table(pa.Table.from_pylist(rows), table / "a.parquet", row_group_size=20)
    corpus = [{"_id": f"d{i}", "title": "T", "text": f"text {i}"} for i in range(50)]
    write_jsonl(folder / "beir" / "corpus.jsonl", corpus)
    queries = [{"_id": f"q{i}", "text": f"query {i}"} for i in range(20)]
    write_jsonl(folder / "beir" / "queries.jsonl", queries)
    judged = [f"q{i % 20}\td{i}\t{i % 3}" for i in range(50)]
    text = "\n".join(["query-id\tcorpus-id\tscore", *judged])
    (folder / "beir" / "qrels.tsv").write_text(text)
    beir = folder / "beir"
    made: dict[str, dict[str, Any]] = {
        f"{name}{ending}": {"kind": name, "path": f"{folder}/{name}{ending}"}
        for name in tables
        for ending in ("", "-table")
    }
    made["beir"] = {
        "kind": "beir",
        "path": f"{beir}/qrels.tsv",
        "corpus": f"{beir}/corpus.jsonl",
        "queries": f"{beir}/queries.jsonl",
    }
    return made


def test_the_same_records_for_one_piece_and_for_many(tmp_path: Path, monkeypatch) -> None:
    found = sources(tmp_path / "in")
    whole = {}
    for name, source in found.items():
        whole[name], _ = made_records(tmp_path / "one", source)
        assert len(whole[name]) > 10
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 700)
    assert len(list_pieces(str(tmp_path / "in" / "nli"))) > 3
    assert len(list_pieces(str(tmp_path / "in" / "nli-table"))) > 3
    for name, records in whole.items():
        again, made = made_records(tmp_path / "many", found[name])
        assert again == records, name
        assert balanced(made.manifest)


def test_origins_lead_back_to_the_very_row(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 700)
    texts = {
        "pairs": lambda row: {row["query"], *row["positive"]},
        "sts": lambda row: {row["sentence1"], row["sentence2"]},
        "classes": lambda row: {row["text"]},
    }
    found = sources(tmp_path / "in")
    for name, told in texts.items():
        for ending in ("", "-table"):
            records, _ = made_records(tmp_path / "out", found[f"{name}{ending}"])
            for record in records:
                (origin,) = record.origin
                row = row_at(tmp_path / "in" / f"{name}{ending}", origin)
                shown = {record.query, *record.positives}
                assert record.query in told(row)
                if name != "classes":
                    assert shown == told(row)


def test_the_index_tells_languages_apart(tmp_path: Path) -> None:
    languages = ["de", None, "en", "de"]
    rows = [{"query": f"q {i}", "positive": "p", "lang": x} for i, x in enumerate(languages)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    source = {"kind": "pairs", "path": str(tmp_path / "a.jsonl"), "language": "lang"}
    _, made = made_records(tmp_path / "out", source)
    hashes = read_column(made.parts, "language_hash")
    assert hashes.tolist() == [label_hash(language) for language in languages]
    assert hashes[1] == NO_HASH
    assert isinstance(made.parts[0], Part)


def test_a_second_run_reads_nothing_and_other_content_is_other_work(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, nli_rows())
    source = {"kind": "nli", "path": str(path)}
    first, made = made_records(tmp_path / "out", source)
    monkeypatch.setattr("rayembed.data.sources.nli._told", lambda *a: pytest.fail("read"))
    again, found = made_records(tmp_path / "out", source)
    assert again == first
    assert found.folder == made.folder
    monkeypatch.undo()
    write_jsonl(path, nli_rows()[:-1])
    _, other = made_records(tmp_path / "out", source)
    assert other.folder != made.folder


def test_records_survive_a_kill_between_scatter_and_conversion(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, nli_rows())
    source = {"kind": "nli", "path": str(path)}
    wanted, _ = made_records(tmp_path / "whole", source)

    class Killed(BaseException):
        pass

    def kill(*arguments: Any) -> Record:
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr("rayembed.data.engine.exchange.Buckets.records", kill)
        with pytest.raises(Killed):
            made_records(tmp_path / "out", source)
    monkeypatch.setattr("rayembed.data.sources.nli._told", lambda *a: pytest.fail("read"))
    again, _ = made_records(tmp_path / "out", source)
    assert again == wanted


def test_rows_with_names_are_told_apart_by_them(tmp_path: Path) -> None:
    rows = [{"name": f"n {i}", "query": "q", "positive": "p"} for i in (1, 2, 1)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    source = {"kind": "pairs", "path": str(tmp_path / "a.jsonl")}
    records, made = made_records(tmp_path / "out", {**source, "id": "name"})
    assert [record.id for record in records] == ["own/n 1", "own/n 2"]
    assert made.manifest["dropped"] == {"duplicate": 1}
    # Control: by their content they are one row.
    assert len(made_records(tmp_path / "other", source)[0]) == 1
    both = {**source, "id": "name", "both_directions": True}
    records, _ = made_records(tmp_path / "both", both)
    assert [record.id for record in records] == ["own/n 1", "own/n 1/0", "own/n 2", "own/n 2/0"]
    classes = [{"name": f"n {i}", "text": "t", "label": f"l{i % 2}"} for i in range(4)]
    write_jsonl(tmp_path / "b.jsonl", classes)
    source = {"kind": "classes", "path": str(tmp_path / "b.jsonl"), "label_form": "label"}
    records, _ = made_records(tmp_path / "classes", {**source, "id": "name"})
    assert [record.id for record in records] == [f"own/n {i}" for i in range(4)]


def test_the_log_tells_what_became_of_the_rows(tmp_path: Path, caplog) -> None:
    rows = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(1200)]
    write_jsonl(tmp_path / "a.jsonl", [*rows, *rows[:10], {"query": "x", "positive": ""}])
    caplog.set_level("INFO")
    source = {"kind": "pairs", "path": str(tmp_path / "a.jsonl")}
    made_records(tmp_path / "out", source)
    (told,) = [m for m in caplog.messages if m.startswith("records own: ") and "read" in m]
    assert told.startswith("records own: 1,211 rows read, 1 rejected (1 × ")
    assert told.endswith("), 1,210 records, 10 × duplicate dropped")
    write_jsonl(tmp_path / "b.jsonl", rows[:3])
    made_records(tmp_path / "out", {**source, "path": str(tmp_path / "b.jsonl")})
    assert "records own: 3 rows read, 0 rejected, 3 records" in caplog.messages


@pytest.mark.parametrize("path", ["gs://", "/tmp/" + "a" * 300])
def test_storage_that_cannot_be_reached_is_told_with_the_path(path: str) -> None:
    with pytest.raises(DataError, match=r"the rows at '.*' cannot be reached: .*Check the address"):
        list_pieces(path)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_file_that_is_one_array_is_told_to_be_none_of_rows(indent, name, tmp_path: Path) -> None:
    pack = gzip.compress if name.endswith(".gz") else bytes
    rows = [{"query": "q", "positive": "p"}, {"query": "r", "positive": "s"}]
    (tmp_path / name).write_bytes(pack(json.dumps(rows, indent=indent).encode()))
    (piece,) = list_pieces(str(tmp_path / name))
    with pytest.raises(
        DataError, match=r"one JSON array, but must be JSONL with one row on each line"
    ):
        next(read_rows(piece))
    for lines in ('["q", "p"]\n["r", "s"]\n', '{"query": "q"}\n'):
        (tmp_path / name).write_bytes(pack(lines.encode()))
        (piece,) = list_pieces(str(tmp_path / name))
        assert len(list(read_rows(piece))) == lines.count("\n")
