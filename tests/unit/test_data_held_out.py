"""Held-out parts: chosen by text alone, in no training row, written as a retrieval set."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dies_once import innermost

from rayembed.config.data_run import DataRun
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext, open_artifact
from rayembed.data.engine.parts import read_records
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.held_out import part
from rayembed.data.held_out.part import KEPT
from rayembed.data.prepare import prepare_datasets
from rayembed.data.records import Record
from rayembed.data.sources import files
from rayembed.data.sources.tasks import HELD_OUT_ROW, HELD_OUT_TEXT
from rayembed.data.words import same_text_form
from rayembed.errors import ArtifactError, ConfigError, DataError

FRACTION = {"kind": "fraction", "share": 0.1}


def rows_of(number: int) -> list[dict[str, Any]]:
    """Pairs, of which every fifth document answers two queries and some rows stand there twice."""
    rows = [
        {"query": f"question {i}", "positive": f"answer {i - i % 5 % 2}", "topic": f"t{i % 7}"}
        for i in range(number)
    ]
    return rows + rows[: number // 20]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(
    storage: Path,
    datasets: dict[str, dict[str, Any]],
    execute: Execute = in_process,
    root: str = "",
) -> dict[str, DatasetArtifact]:
    """The records of each data set, made as a job makes them."""
    values = {
        "name": "own",
        "data": {
            "root": root,
            "datasets": [{"name": name, **dataset} for name, dataset in datasets.items()],
        },
    }
    context = PipelineContext(str(storage), 0, execute, root=root)
    done = prepare_datasets(parse(DataRun, values), context)
    return {name: folders[-1] for name, folders in done.items()}


def pairs(path: str, held_out: Any = FRACTION, **source: Any) -> dict[str, Any]:
    source = {"kind": "pairs", "path": path, **source}
    return {"source": source, "held_out": held_out}


def records(artifact: DatasetArtifact) -> list[Record]:
    return [record for part in artifact.parts for record in read_records(part.path)]


def part_of(artifact: DatasetArtifact) -> DatasetArtifact:
    folder = artifact.held_out_folder
    assert folder is not None
    return open_artifact(folder)


def retrieval_set(artifact: DatasetArtifact) -> tuple[set[str], dict[str, set[str]]]:
    """Documents, and query → its relevant documents, all as texts."""
    folder = Path(part_of(artifact).folder) / "beir"
    texts = {}
    for name in ("corpus", "queries"):
        lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        texts[name] = {line["_id"]: line["text"] for line in lines}
    judged: dict[str, set[str]] = {query: set() for query in texts["queries"].values()}
    for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        assert grade == "1"
        judged[texts["queries"][query]].add(texts["corpus"][document])
    return set(texts["corpus"].values()), judged


def texts_of(made: list[Record]) -> set[str]:
    return {text for r in made for text in (r.query, *r.positives, *(n.text for n in r.negatives))}


def test_no_held_out_text_is_trained_on_and_no_row_is_lost(tmp_path: Path) -> None:
    rows = rows_of(300)
    path = write(tmp_path / "pairs.jsonl", [*rows, {"query": "", "positive": "no question"}])
    made = prepare(tmp_path / "out", {"pairs": pairs(path)})["pairs"]
    documents, judged = retrieval_set(made)
    distinct = {row["positive"] for row in rows}
    assert len(documents) == round(0.1 * len(distinct))
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(row["query"], set()).add(row["positive"])
    assert judged == {q: found for q, found in answers.items() if found <= documents}
    assert len(judged) > len(documents)  # documents with two queries
    assert not texts_of(records(made)) & (documents | judged.keys())
    rejected = made.manifest["rejected"]
    held_out = sum(row["positive"] in documents for row in rows)
    assert rejected == {HELD_OUT_ROW: held_out, "no query": 1}
    assert made.manifest["rows_in"] == len(rows) + 1
    assert made.manifest["records_made"] == len(rows) - held_out
    part = part_of(made)
    assert part.manifest["rejected"] == {KEPT: len(rows) - held_out, "no query": 1}
    assert (part.manifest["rows_in"], part.manifest["rows_out"]) == (len(rows) + 1, held_out)
    told = {"rows": held_out, "queries": len(judged), "documents": len(documents)}
    assert made.manifest["held_out"].items() >= told.items()
    audit = (Path(made.folder) / "audit.html").read_text()
    assert HELD_OUT_ROW in audit
    assert f'<th>documents</th><td class="n">{len(documents)}</td>' in audit
    assert (Path(part.folder) / "audit.html").exists()
    control = prepare(tmp_path / "out", {"pairs": pairs(path, None)})["pairs"]
    assert texts_of(records(control)) >= documents | judged.keys()
    assert control.held_out_folder is None


def test_files_and_pieces_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(300)
    whole = write(tmp_path / "a" / "pairs.jsonl", rows)
    first = part_of(prepare(tmp_path / "one", {"pairs": pairs(whole)})["pairs"])
    for number in range(3):
        write(tmp_path / "b" / f"{2 - number}.jsonl", rows[number::3])
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 1000)
    split = prepare(tmp_path / "two", {"pairs": pairs(str(tmp_path / "b"))})["pairs"]
    again = part_of(split)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        assert (Path(first.folder) / "beir" / name).read_bytes() == (
            Path(again.folder) / "beir" / name
        ).read_bytes()
    assert first.manifest["rows_out"] == again.manifest["rows_out"]
    other = {**FRACTION, "seed": 1}
    control = prepare(tmp_path / "three", {"pairs": pairs(whole, other)})["pairs"]
    assert retrieval_set(control)[0] != retrieval_set(split)[0]


def test_a_document_counts_once_however_many_rows_have_it(tmp_path: Path) -> None:
    """Of 40 documents a quarter are held out, though one of them has 1,000 of the 1,039 rows."""
    rows = [{"query": f"q {i}", "positive": f"d {max(0, i - 999)}"} for i in range(1039)]
    path = write(tmp_path / "pairs.jsonl", rows)
    held_out = {**FRACTION, "share": 0.25}
    documents, _ = retrieval_set(prepare(tmp_path, {"pairs": pairs(path, held_out)})["pairs"])
    assert len(documents) == 10


def test_queries_and_documents_are_capped_by_the_smallest_hashes(tmp_path: Path) -> None:
    rows = [{"query": f"q {i}", "positive": f"d {i % 400}"} for i in range(1200)]
    path = write(tmp_path / "pairs.jsonl", rows)
    small = prepare(tmp_path, {"pairs": pairs(path, {**FRACTION, "max_queries": 12})})["pairs"]
    large = prepare(tmp_path, {"pairs": pairs(path)})["pairs"]
    (few, asked), (many, all_asked) = retrieval_set(small), retrieval_set(large)
    assert (len(few), len(asked)) == (12, 12)
    assert (len(many), len(all_asked)) == (40, 120)
    assert few < many
    assert part_of(small).manifest["rows_out"] == 36  # its other queries are not trained on either
    assert not texts_of(records(small)) & {r["query"] for r in rows if r["positive"] in few}


def test_several_positives_and_a_query_with_another_document(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"query": f"q {i}", "positive": [f"d {i}"]} for i in range(100)]
    plain = prepare(tmp_path, {"pairs": pairs(write(tmp_path / "pairs.jsonl", rows))})["pairs"]
    documents, judged = retrieval_set(plain)
    out, also, *_ = sorted(documents)
    asked = f"q {out[2:]}"
    more = [
        {"query": "both", "positive": [out, also]},
        {"query": "in two rows", "positive": [out]},
        {"query": "in two rows", "positive": [also]},
        {"query": "one of two", "positive": [out, "beside"]},
        {"query": "of beside alone", "positive": ["beside"]},
        {"query": asked, "positive": ["another answer"]},
    ]
    path = write(tmp_path / "more.jsonl", rows + more)
    made = prepare(tmp_path, {"pairs": pairs(path)})["pairs"]
    added = {"both": {out, also}, "in two rows": {out, also}, "one of two": {out}}
    assert retrieval_set(made) == (documents, judged | added)
    assert made.manifest["rejected"] == {HELD_OUT_ROW: 10 + 4, HELD_OUT_TEXT: 2}
    assert len(records(made)) == 90
    assert not texts_of(records(made)) & {*added, asked, out, also, "beside", "another answer"}
    control = prepare(tmp_path, {"pairs": pairs(path, None)})["pairs"]
    assert texts_of(records(control)) >= {*added, asked, out, also, "beside", "another answer"}


def test_a_held_out_negative_costs_no_row(tmp_path: Path) -> None:
    rows = [
        {
            "query": f"q {i}",
            "positive": f"d {i}",
            "neg": [f"d {(i + k) % 200}" for k in range(1, 8)],
        }
        for i in range(200)
    ]
    path = write(tmp_path / "pairs.jsonl", rows)
    made = prepare(tmp_path, {"pairs": pairs(path, negatives="neg")})["pairs"]
    documents, _ = retrieval_set(made)
    found = records(made)
    assert len(found) == 180  # each held-out document is a negative of seven rows
    assert not texts_of(found) & documents
    for record in found:
        (row,) = [row for row in rows if row["query"] == record.query]
        assert [n.text for n in record.negatives] == [t for t in row["neg"] if t not in documents]
    lost = 7 * 180 - sum(len(record.negatives) for record in found)
    assert made.manifest["negatives_held_out"] == lost > 100


def test_texts_are_banned_from_every_data_set(tmp_path: Path) -> None:
    rows = rows_of(200)
    path = write(tmp_path / "pairs.jsonl", rows)
    copies = [{"query": f"other {i}", "positive": row["positive"]} for i, row in enumerate(rows)]
    other = write(tmp_path / "other.jsonl", copies)
    sets = {"other": pairs(other, None), "pairs": pairs(path)}
    made = prepare(tmp_path, sets)
    documents, _ = retrieval_set(made["pairs"])
    touched = sum(row["positive"] in documents for row in copies)
    assert made["other"].manifest["rejected"] == {HELD_OUT_TEXT: touched}
    assert made["other"].held_out_folder is None
    alone = prepare(tmp_path, {"other": pairs(other, None)})["other"]
    assert alone.manifest["rejected"] == {}


def test_whole_groups_are_held_out(tmp_path: Path) -> None:
    rows = rows_of(280)
    path = write(tmp_path / "pairs.jsonl", rows)
    groups = {"kind": "groups", "column": "topic", "share": 0.3}
    made = prepare(tmp_path, {"pairs": pairs(path, groups)})["pairs"]
    documents, judged = retrieval_set(made)
    out = {row["topic"] for row in rows} - {
        row["topic"] for row in rows if row["query"] in texts_of(records(made))
    }
    assert len(out) == 2
    assert judged.keys() == {row["query"] for row in rows if row["topic"] in out}
    assert documents == {row["positive"] for row in rows if row["topic"] in out}
    named = {"kind": "groups", "column": "topic", "values": sorted(out)}
    assert retrieval_set(prepare(tmp_path, {"pairs": pairs(path, named)})["pairs"]) == (
        documents,
        judged,
    )
    # Two texts that are both held out, in a row of another group, are judged as well.
    first, *_ = sorted(judged)
    another = next(document for document in sorted(documents) if document not in judged[first])
    across = {"query": first, "positive": another, "topic": "elsewhere"}
    more = write(tmp_path / "more.jsonl", [*rows, across, {**across, "positive": "free"}])
    added = prepare(tmp_path, {"pairs": pairs(more, named)})["pairs"]
    assert retrieval_set(added)[1][first] == {*judged[first], another}
    assert added.manifest["rejected"][HELD_OUT_TEXT] >= 1
    assert "free" not in texts_of(records(added))


def test_rows_are_held_out_by_a_list_of_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": i, "query": f"q {i}", "positive": f"d {i}"} for i in range(60)]
    write(tmp_path / "pairs.jsonl", rows)
    (tmp_path / "dev.txt").write_text("\n".join(map(str, [*range(12), 99])) + "\n\n")
    by_file = {"kind": "ids", "column": "id", "file": "dev.txt"}
    listed = {"kind": "ids", "column": "id", "values": [str(i) for i in range(12)]}
    root = str(tmp_path)
    with caplog.at_level(logging.WARNING):
        made = prepare(tmp_path, {"pairs": pairs("pairs.jsonl", by_file)}, root=root)["pairs"]
    assert "1 of the 13 values to hold out occur in no row of column 'id'" in caplog.text
    expected = {f"q {i}": {f"d {i}"} for i in range(12)}
    assert retrieval_set(made)[1] == expected
    same = prepare(tmp_path, {"pairs": pairs("pairs.jsonl", listed)}, root=root)["pairs"]
    assert retrieval_set(same)[1] == expected
    (tmp_path / "dev.txt").write_text("\n".join(map(str, range(20))))  # a new list is another part
    grown = prepare(tmp_path, {"pairs": pairs("pairs.jsonl", by_file)}, root=root)["pairs"]
    assert len(retrieval_set(grown)[1]) == 20
    (tmp_path / "dev.txt").write_text("\n")
    with pytest.raises(DataError, match=r"dev.txt' is empty; it must have one id on each line"):
        prepare(tmp_path, {"pairs": pairs("pairs.jsonl", by_file)}, root=root)
    with pytest.raises(ConfigError, match=r"held_out.column = 'idd': .* did you mean 'id'"):
        prepare(tmp_path, {"pairs": pairs("pairs.jsonl", {**listed, "column": "idd"})}, root=root)


@pytest.mark.parametrize(
    ("number", "held_out", "message"),
    [
        (60, FRACTION, r"60 distinct documents, of which 6 would be held out.*share to 0.17"),
        (15, FRACTION, r"15 distinct documents.*it needs more rows, or set .*held_out=null"),
        (90, {**FRACTION, "max_queries": 5}, r"raise .*held_out.max_queries to at least 10"),
        (
            60,
            {"kind": "groups", "column": "query", "values": ["q 1", "q 2"]},
            r"held-out rows have 2 distinct documents.*hold out more groups or ids",
        ),
    ],
)
def test_too_few_documents_are_refused(
    tmp_path: Path, number: int, held_out: dict[str, Any], message: str
) -> None:
    rows = [{"query": f"q {i}", "positive": f"d {i}"} for i in range(number)]
    path = write(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(DataError, match=f"(?s){message}"):
        prepare(tmp_path, {"pairs": pairs(path, held_out)})


def test_bad_rows_are_told_as_without_a_held_out_part(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [{"query": "", "positive": f"d {i}"} for i in range(9)])
    for held_out in (FRACTION, {"kind": "groups", "column": "positive", "share": 0.5}, None):
        with pytest.raises(DataError, match=r"(?s)is empty: .* has 9 rows, none usable .9 × no q"):
            prepare(tmp_path, {"pairs": pairs(path, held_out)})


def test_records_of_an_earlier_job_hand_their_part_on(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", rows_of(300))
    first = prepare(tmp_path / "first", {"pairs": pairs(path)})["pairs"]
    documents, judged = retrieval_set(first)
    source = {"kind": "records", "path": first.folder}
    for held_out in (FRACTION, None):
        sets = {"later": {"source": source, "held_out": held_out}, "raw": pairs(path, None)}
        made = prepare(tmp_path / "second", sets)
        assert retrieval_set(made["later"]) == (documents, judged)
        assert made["later"].manifest["rows_out"] == first.manifest["rows_out"]
        assert not texts_of(records(made["raw"])) & (documents | judged.keys())
    again = {"kind": "records", "path": made["later"].folder}
    third = prepare(tmp_path / "third", {"third": {"source": again, "held_out": FRACTION}})
    assert retrieval_set(third["third"]) == (documents, judged)
    groups = {"kind": "groups", "column": "id", "share": 0.5}
    with pytest.raises(ConfigError, match=r"already have a held-out part"):
        prepare(tmp_path / "second", {"later": {"source": source, "held_out": groups}})


def test_a_part_is_found_beside_its_records_wherever_the_storage_was_moved() -> None:
    records_in = "s3://bucket/runs/data/records/pairs-1?endpoint_override=host"
    beside = DatasetArtifact(records_in, {"held_out": {"folder": "held_out/pairs-2"}})
    found = "s3://bucket/runs/data/held_out/pairs-2?endpoint_override=host"
    assert beside.held_out_folder == found
    elsewhere = DatasetArtifact("/out/data/mined/pairs-1", {"held_out": {"folder": found}})
    assert elsewhere.held_out_folder == found


def test_records_without_a_part_have_one_held_out(tmp_path: Path) -> None:
    rows = [{"query": f"q {i}", "positive": f"d {i}", "of": f"c{i % 5}"} for i in range(200)]
    path = write(tmp_path / "pairs.jsonl", rows)
    first = prepare(tmp_path, {"pairs": pairs(path, None, label="of")})["pairs"]
    source = {"kind": "records", "path": first.folder}
    made = prepare(tmp_path, {"later": {"source": source, "held_out": FRACTION}})["later"]
    assert len(retrieval_set(made)[0]) == 20
    assert made.manifest["rejected"] == {HELD_OUT_ROW: 20}
    by_class = {"kind": "groups", "column": "label", "values": ["c3"]}
    made = prepare(tmp_path, {"later": {"source": source, "held_out": by_class}})["later"]
    assert retrieval_set(made)[1].keys() == {row["query"] for row in rows if row["of"] == "c3"}


def test_symmetric_pairs_are_held_out_as_rows(tmp_path: Path) -> None:
    rows = [{"query": f"one {i}", "positive": f"other {i}"} for i in range(200)]
    path = write(tmp_path / "pairs.jsonl", rows)
    made = prepare(tmp_path, {"pairs": pairs(path, both_directions=True)})["pairs"]
    documents, judged = retrieval_set(made)
    assert (len(documents), len(judged)) == (20, 20)
    assert len(records(made)) == 360
    assert not texts_of(records(made)) & (documents | judged.keys())


@pytest.mark.parametrize(("units", "killed"), [(3, "ConvertRows"), (7, "CollectRows")])
def test_a_killed_choice_goes_on_and_a_finished_one_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: int, killed: str
) -> None:
    path = write(tmp_path / "pairs.jsonl", rows_of(300))
    expected = part_of(prepare(tmp_path / "whole", {"pairs": pairs(path)})["pairs"])
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 4000)
    done: Counter[str] = Counter()

    def failing(task: Any, items: Any, needs: Any) -> Any:
        for number, result in enumerate(in_process(task, items, needs)):
            if done["units"] == units:
                raise KeyboardInterrupt
            done["units"] += 1
            yield result
            assert number < 100

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "killed", {"pairs": pairs(path)}, failing)
    finished = {path.parent.parent.name for path in (tmp_path / "killed").rglob("manifest.json")}
    assert finished == ({"converted"} if killed == "CollectRows" else set())
    calls: Counter[str] = Counter()

    def counting(task: Any, items: Any, needs: Any) -> Any:
        calls[type(innermost(task)).__name__] += len(items)
        yield from in_process(task, items, needs)

    part = part_of(prepare(tmp_path / "killed", {"pairs": pairs(path)}, counting)["pairs"])
    assert calls[killed] < calls["LeaveOut"]  # some were there
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        found = (Path(part.folder) / "beir" / name).read_bytes()
        assert found == (Path(expected.folder) / "beir" / name).read_bytes()
    calls.clear()
    prepare(tmp_path / "killed", {"pairs": pairs(path)}, counting)
    assert not calls


SPELLINGS = {
    "space around": lambda text: f" {text}\n",
    "case and space": lambda text: f"{text}".upper().replace(" ", "  "),
    "width": lambda text: text.replace("d", "ｄ").replace(" ", "\u3000"),
}


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_document_is_one_however_it_is_spelled(spelled: str, tmp_path: Path) -> None:
    spell = SPELLINGS[spelled]
    rows = [{"query": f"q {i}", "positive": f"d {i}"} for i in range(100)]
    path = write(
        tmp_path / "pairs.jsonl", [*rows, *({**r, "query": r["query"] + "b"} for r in rows)]
    )
    padded = [{**r, "query": r["query"] + "b", "positive": spell(r["positive"])} for r in rows]
    other = write(tmp_path / "other.jsonl", [*rows, *padded])
    one, two = (prepare(tmp_path, {"pairs": pairs(p)})["pairs"] for p in (path, other))
    sets = [
        ({*map(same_text_form, of)}, {q: {*map(same_text_form, d)} for q, d in judged.items()})
        for of, judged in map(retrieval_set, (one, two))
    ]
    assert sets[0] == sets[1]
    assert len(retrieval_set(two)[0]) == 10, "one document stands in the set twice"
    assert sets[1][0].isdisjoint(map(same_text_form, texts_of(records(two))))
    assert two.manifest["rejected"] == {HELD_OUT_ROW: 20}


def test_no_spelling_of_a_held_out_text_is_trained_on(tmp_path: Path) -> None:
    rows = [{"query": f"what is {i}", "positive": f"the answer {i}"} for i in range(200)]
    path = write(tmp_path / "pairs.jsonl", rows)
    further = [
        row
        for i in range(200)
        for row in (
            {"query": f"What is  {i}", "positive": f"another answer {i}"},
            {"query": f"further {i}", "positive": f"The answer\u00a0{i}"},
            {"query": f"third {i}", "positive": f"x {i}", "negatives": [f"THE ANSWER {i}"]},
        )
    ]
    other = write(tmp_path / "other.jsonl", further)
    sets = {"pairs": pairs(path), "other": pairs(other, None, negatives="negatives")}
    made = prepare(tmp_path / "out", sets)
    documents, judged = retrieval_set(made["pairs"])
    held_out = {*map(same_text_form, (*documents, *judged))}
    assert len(held_out) == 40
    left = records(made["other"])
    trained = {text for r in left for text in (r.query, *r.positives)}
    trained |= {negative.text for r in left for negative in r.negatives}
    assert held_out.isdisjoint(map(same_text_form, trained))
    assert made["other"].manifest["rejected"] == {HELD_OUT_TEXT: 40}
    assert made["other"].manifest["negatives_held_out"] == 20
    assert len(left) == 600 - 40


def test_a_part_of_another_form_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "pairs.jsonl", rows_of(300))
    with monkeypatch.context() as patch:
        patch.setattr(part, "CODE_VERSION", 0)
        first = prepare(tmp_path / "first", {"pairs": pairs(path)})["pairs"]
    later = {"source": {"kind": "records", "path": first.folder}}
    with pytest.raises(
        ArtifactError, match=r"identifies texts by version 0 .* prepare these records"
    ):
        prepare(tmp_path / "second", {"later": later})


def test_graded_pairs_are_held_out_with_their_similarities(tmp_path: Path) -> None:
    rows = [
        {"sentence1": f"one {i % 40}", "sentence2": f"other {i}", "score": i % 6}
        for i in range(120)
    ]
    source = {"kind": "graded", "path": write(tmp_path / "graded.jsonl", rows)}
    made = prepare(tmp_path / "out", {"pairs": {"source": source, "held_out": FRACTION}})["pairs"]
    lines = (Path(part_of(made).folder) / "graded.jsonl").read_text().splitlines()
    held_out = [json.loads(line) for line in lines]
    assert len(held_out) == 12
    given = {(row["sentence1"], row["sentence2"]): row["score"] / 5 for row in rows}
    for row in held_out:
        pair = row["sentence1"], row["sentence2"]
        assert row["score"] == pytest.approx(given[pair])
        assert not set(pair) & texts_of(records(made))
    kept = [row for row in rows if row["sentence2"] in texts_of(records(made))]
    assert len(kept) == made.manifest["records_made"] < 120 - 12, "rows with its first text as well"
    assert made.manifest["held_out"]["pairs"] == 12
    again = prepare(tmp_path / "again", {"pairs": {"source": source, "held_out": FRACTION}})[
        "pairs"
    ]
    assert (Path(part_of(again).folder) / "graded.jsonl").read_text().splitlines() == lines
