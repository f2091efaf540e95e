"""The user's own queries, documents and judgements as a task of mteb."""

import errno
import gzip
import hashlib
import json
import math
import os
import pickle
from pathlib import Path

import mteb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from garbling import damaged
from s3_server import BUCKET, s3_server
from word_encoder import WordEncoder, word_vectors

from rayembed.assets.cache import filled
from rayembed.assets.storage import write_atomic
from rayembed.config.own_sets import RetrievalSet
from rayembed.config.settings import parse
from rayembed.errors import ConfigError, DataError, StorageFullError
from rayembed.evaluation import own_data, own_set
from rayembed.evaluation.own_set import OwnTask

DOCUMENTS = {
    "d1": ("Kettles", "boil water in a kettle"),
    "d2": ("", "the train leaves the station"),
    "d3": ("Gardens", "roses and tulips grow in a garden"),
    "d4": ("Trains", "tracks signals and stations"),
    "d5": ("", "bread needs flour and an oven"),
}
QUERIES = {"q1": "how to boil water", "q2": "train station", "q3": "flowers in gardens"}
GRADES = {"q1": {"d1": 1, "d5": 0}, "q2": {"d2": 2, "d4": 1}, "q3": {"d3": 1}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    own_set._written_set.cache_clear()
    yield tmp_path / "cache"
    own_set._written_set.cache_clear()


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def corpus_rows():
    return [{"_id": n, "title": t, "text": x} for n, (t, x) in DOCUMENTS.items()]


def grade_rows():
    return [
        {"query-id": q, "corpus-id": d, "score": g}
        for q, found in GRADES.items()
        for d, g in found.items()
    ]


def write(folder: Path, *, corpus=None, queries=None, grades=None) -> Path:
    """A set in BEIR's layout."""
    queries = queries or [{"_id": name, "text": text} for name, text in QUERIES.items()]
    grades = grades or grade_rows()
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(lines(corpus or corpus_rows()))
    (folder / "queries.jsonl").write_text(lines(queries))
    rows = [f"{row['query-id']}\t{row['corpus-id']}\t{row['score']}\n" for row in grades]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    (folder / "README.md").write_text("A card is no data.")
    return folder


def own_task(name: str, path: str, **settings) -> OwnTask:
    return OwnTask(parse(RetrievalSet, {"name": name, "path": path, **settings}))


def score_of(own: OwnTask, model=None) -> mteb.TaskResult:
    done = mteb.evaluate(
        model or WordEncoder(), own.load(), cache=None, co2_tracker=False, show_progress_bar=False
    )
    return done.task_results[0]


def ndcg_at_10() -> float:
    """By its definition, over the words of title and text."""
    texts = [f"{title} {text}".strip() for title, text in DOCUMENTS.values()]
    similarity = word_vectors(list(QUERIES.values())) @ word_vectors(texts).T
    found = []
    for row, query in zip(similarity, QUERIES, strict=True):
        gains = [GRADES[query].get(list(DOCUMENTS)[place], 0) for place in np.argsort(-row)]
        best = sorted(GRADES[query].values(), reverse=True)
        discounted = [sum(g / math.log2(2 + n) for n, g in enumerate(x)) for x in (gains, best)]
        found.append(discounted[0] / discounted[1])
    return sum(found) / len(found)


def test_an_own_set_is_scored_as_its_definition_says(tmp_path):
    own = own_task("SupportRetrieval", str(write(tmp_path / "set")))
    result = score_of(own)
    assert result.get_score() == pytest.approx(ndcg_at_10(), abs=1e-5)
    assert ndcg_at_10() < 1  # or any order would do
    assert result.scores["test"][0]["main_score"] == result.scores["test"][0]["ndcg_at_10"]
    assert own.num_texts == 8
    assert own.abouts["default"].dropped == {}


def test_the_documents_are_mapped_and_not_held(tmp_path):
    task = pickle.loads(pickle.dumps(own_task("Own", str(write(tmp_path / "set"))))).load()
    task.load_data()
    data = task.dataset["default"]["test"]
    for part in ("corpus", "queries"):
        assert [Path(file["filename"]).suffix for file in data[part].cache_files] == [".arrow"]
    assert data["corpus"].column_names == ["id", "title", "text"]
    assert data["relevant_docs"] == GRADES
    task.unload_data()
    assert not task.dataset
    task.load_data()
    assert task.dataset["default"]["test"]["relevant_docs"] == GRADES


@pytest.mark.parametrize("form", ["parquet", "csv", "folders", "gz"])
def test_other_formats_give_the_same_task(tmp_path, form):
    plain = own_task("Own", str(write(tmp_path / "plain")))
    folder = write(tmp_path / form)
    numbers = [
        {"id": row["_id"], "title": row["title"], "text": row["text"]} for row in corpus_rows()
    ]
    (folder / "corpus.jsonl").unlink()
    match form:
        case "parquet":
            pq.write_table(pa.Table.from_pylist(numbers), folder / "corpus.parquet")
            (folder / "qrels" / "test.tsv").unlink()
            grades = [{**row, "score": float(row["score"])} for row in grade_rows()]
            pq.write_table(pa.Table.from_pylist(grades), folder / "qrels" / "test.parquet")
        case "csv":
            rows = [f'{row["id"]},{row["title"]},"{row["text"]}"' for row in numbers]
            (folder / "corpus.csv").write_text("\n".join(["id,title,text", *rows, ""]))
        case "folders":
            (folder / "corpus").mkdir()
            (folder / "corpus" / "a.jsonl").write_text(lines(numbers[:2]))
            (folder / "corpus" / "b.jsonl").write_text(lines(numbers[2:]))
        case "gz":
            (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines(numbers).encode()))
    other = own_task("Own", str(folder))
    assert other.load().metadata.revision == plain.load().metadata.revision
    assert other.abouts == plain.abouts
    assert score_of(other).get_score() == score_of(plain).get_score()


def test_the_revision_tells_content_and_instruction_apart(tmp_path):
    revisions = {own_task("Own", str(write(tmp_path / "a"))).load().metadata.revision}
    told = own_task("Own", str(tmp_path / "a"), instruction="Find the page that answers")
    assert told.load().metadata.prompt == {"query": "Find the page that answers"}
    revisions.add(told.load().metadata.revision)
    changed = [*corpus_rows()[:-1], {"_id": "d5", "title": "", "text": "bread needs flour"}]
    revisions.add(
        own_task("Own", str(write(tmp_path / "b", corpus=changed))).load().metadata.revision
    )
    grades = [{**row, "score": 3} for row in grade_rows()]
    revisions.add(
        own_task("Own", str(write(tmp_path / "c", grades=grades))).load().metadata.revision
    )
    assert len(revisions) == 4
    again = own_task("Own", str(write(tmp_path / "again"))).load().metadata.revision
    assert again in revisions


def test_a_set_is_read_once_and_again_when_it_changes(tmp_path, cache, monkeypatch):
    folder = write(tmp_path / "set")
    written = []
    plain = own_set.write_set
    monkeypatch.setattr(own_set, "write_set", lambda *a: written.append(a) or plain(*a))
    for _ in range(2):
        own_task("Own", str(folder)).load()
        own_set._written_set.cache_clear()  # another process
    assert len(written) == 1
    (folder / "queries.jsonl").write_text(lines([{"_id": n, "text": "other"} for n in QUERIES]))
    own_task("Own", str(folder)).load()
    assert len(written) == 2


def content_of(own: OwnTask):
    """Revision and content, as another process finds them."""
    own_set._written_set.cache_clear()
    task = own.load()
    task.load_data()
    data = task.dataset["default"]["test"]
    found = data["corpus"].to_dict(), data["queries"].to_dict(), data["relevant_docs"]
    return task.metadata.revision, found


@pytest.mark.parametrize("name", ["corpus.arrow", "queries.arrow", "qrels.arrow", "about.json"])
def test_a_flipped_bit_in_the_cache_is_not_scored(tmp_path, cache, caplog, name):
    own = own_task("Own", str(write(tmp_path / "set")))
    wanted = content_of(own)
    (file,) = (cache / "own-sets").glob(f"*/files/{name}")
    whole = file.read_bytes()
    for place in range(15):
        replace_file(file, damaged(whole, "flip", f"{name} {place}"))
        assert content_of(own) == wanted
        assert file.read_bytes() == whole, "it is made anew"
    assert caplog.text.count("incomplete or damaged, so rayembed creates it again") == 15


def test_without_digests_a_flipped_bit_would_be_another_text(tmp_path, cache, monkeypatch):
    """The control of the test before."""
    monkeypatch.setattr(own_set, "filled", lambda entry, fill, checked: filled(entry, fill))
    own = own_task("Own", str(write(tmp_path / "set")))
    wanted = content_of(own)
    (file,) = (cache / "own-sets").glob("*/files/corpus.arrow")
    replace_file(file, file.read_bytes().replace(b"tulips", b"tulipr"))
    revision, (corpus, *_) = content_of(own)
    assert revision == wanted[0]
    assert corpus["text"][2] == "roses and tulipr grow in a garden"


def replace_file(file: Path, content: bytes) -> None:
    """Write a file anew; one that is mapped keeps what it had."""
    file.unlink()
    file.write_bytes(content)


def test_a_set_is_read_once_to_be_checked_by_a_process(tmp_path, cache, monkeypatch):
    own = own_task("Own", str(write(tmp_path / "set")))
    content_of(own)
    size = sum(file.stat().st_size for file in (cache / "own-sets").glob("*/files/*"))
    read = []
    plain = hashlib.file_digest

    def counted(file, digest):
        read.append(os.fstat(file.fileno()).st_size)
        return plain(file, digest)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    content_of(own)  # another process
    assert own.num_texts == 8
    own.load().load_data()
    assert sum(read) == size


def test_a_disk_that_fills_up_while_a_set_is_kept_is_told(tmp_path, cache, monkeypatch):
    own = own_task("Own", str(write(tmp_path / "set")))

    def fills_up(_file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(own_data.ArrowFile, "_flush", fills_up)
        with pytest.raises(StorageFullError, match=rf"'{cache}/own-sets/.*bytes are free there"):
            own.load()
    assert not list(cache.rglob("*.arrow"))
    own.load()


def test_all_bad_rows_are_counted_with_the_first_examples(tmp_path):
    folder = write(
        tmp_path / "set",
        corpus=[
            *corpus_rows(),
            {"_id": "d1", "title": "", "text": "another kettle"},
            {"title": "", "text": "nobody can name this"},
            {"_id": "d6", "title": " ", "text": ""},
            *({"_id": "d2", "text": f"copy {n}"} for n in range(4)),
        ],
        queries=[
            *({"_id": name, "text": text} for name, text in QUERIES.items()),
            {"_id": "q1", "text": "again"},
            {"_id": "q4", "text": "  "},
        ],
        grades=[
            *grade_rows(),
            {"query-id": "q1", "corpus-id": "d6", "score": 1},
            {"query-id": "q1", "corpus-id": "d99", "score": 1},
            {"query-id": "q9", "corpus-id": "d1", "score": 1},
            {"query-id": "q4", "corpus-id": "d1", "score": 1},
            {"query-id": "q2", "corpus-id": "d1", "score": 0.5},
            {"query-id": "q2", "corpus-id": "d3", "score": "much"},
            {"query-id": "q3", "corpus-id": "d3", "score": 2},
            {"query-id": "", "corpus-id": "d3", "score": 1},
        ],
    )
    with pytest.raises(DataError) as caught:
        own_task("Own", str(folder)).load()
    told = str(caught.value)
    for line in (
        "5 × corpus: id already used by another document (corpus.jsonl@",
        "1 × corpus: the row has no id (corpus.jsonl@",
        "1 × corpus: judged, but has no text (corpus.jsonl@",
        "1 × queries: id already used by another query (queries.jsonl@",
        "1 × queries: the query has no text (queries.jsonl@",
        "1 × qrels/test: document is not in the corpus (query 'q1', document 'd99')",
        "2 × qrels/test: query is not among the queries ('q9', 'q4')",
        "1 × qrels/test: score is not a whole number (test.tsv#",
        "1 × qrels/test: column 'score' is not a number (test.tsv#",
        "1 × qrels/test: a second, different score for the same query and document (test.tsv#",
        "1 × qrels/test: query-id or corpus-id is missing (test.tsv#",
    ):
        assert line in told, f"{line} not in\n{told}"
    assert ", …)" in told.split("id already used by another document")[1].splitlines()[0]


def test_harmless_rows_are_left_out_and_counted(tmp_path):
    folder = write(
        tmp_path / "set",
        corpus=[*corpus_rows(), {"_id": "d6", "title": "", "text": " "}],
        queries=[
            *({"_id": name, "text": text} for name, text in QUERIES.items()),
            {"_id": "q4", "text": "nobody judged this"},
            {"_id": "q5", "text": "nothing answers this"},
        ],
        grades=[*grade_rows(), grade_rows()[0], {"query-id": "q5", "corpus-id": "d1", "score": 0}],
    )
    own = own_task("Own", str(folder))
    assert own.abouts["default"].dropped == {
        "judgements that are there twice": 1,
        "queries without judgements": 1,
        "documents without text": 1,
        "queries that no document is relevant to": 1,
    }
    assert (
        own.abouts["default"].documents,
        own.abouts["default"].queries,
        own.abouts["default"].judgements,
    ) == (5, 3, 5)
    assert score_of(own).get_score() == pytest.approx(ndcg_at_10(), abs=1e-5)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match="no set at"):
        own_task("Own", str(tmp_path / "nowhere")).load()
    folder = write(tmp_path / "set")
    with pytest.raises(DataError, match="no judgements of the split 'dev'; qrels/ has test"):
        own_task("Own", str(folder), split="dev").load()
    (folder / "queries.jsonl").rename(folder / "questions.jsonl")
    with pytest.raises(DataError, match=r"has no queries .*questions\.jsonl"):
        own_task("Own", str(folder)).load()
    nothing = [{"query-id": "q1", "corpus-id": "d1", "score": 0}]
    with pytest.raises(DataError, match="no query with a relevant document"):
        own_task("Own", str(write(tmp_path / "zero", grades=nothing))).load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "SciFact"}, "already the name of another task"),
        ({"name": "my/set"}, "name = 'my/set'.*must begin with a letter"),
        ({"name": "Own", "language": "english"}, "has the language 'english'.*such as eng-Latn"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        own_task(path=str(write(tmp_path / "set")), **settings).load()


@pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])
def test_a_set_in_object_storage_is_the_same(tmp_path, monkeypatch):
    local = write(tmp_path / "set")
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
            write_atomic(f"s3://{BUCKET}/sets/mine/{name}", (local / name).read_bytes())
        remote = own_task("Own", f"s3://{BUCKET}/sets/mine").load()
    here = own_task("Own", str(local)).load()
    assert remote.metadata.revision == here.metadata.revision
    remote.load_data()  # of what was kept on this machine
    assert remote.dataset["default"]["test"]["relevant_docs"] == GRADES
