"""Documents of an index: ids, metadata, rejected rows; pieces by tokens, sentences, headings."""

import datetime
import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_index import write
from tiny_models import wordpiece_tokenizer

from rayembed.config.settings import parse
from rayembed.errors import ConfigError, DataError
from rayembed_extras.indexing.chunks import check_size, splitter
from rayembed_extras.indexing.documents import (
    IndexPiece,
    ReadIndexDocuments,
    document_pieces,
    settled_columns,
)
from rayembed_extras.indexing.rows import accept, metadata_types
from rayembed_extras.indexing.settings import Chunks, Documents


def read(folder, **settings):
    """Columns, results, and rows as dicts."""
    given = parse(Documents, settings)
    pieces = document_pieces(given)
    columns = settled_columns(given, pieces)
    task = ReadIndexDocuments(str(folder), columns, given.chunks, None)
    results = [task(IndexPiece(piece)) for piece in pieces]
    rows = [
        row
        for result in results
        for name, _ in result["files"]
        for row in pq.read_table(folder / name).to_pylist()
    ]
    return columns, results, rows


def test_ids_come_from_a_column_or_the_text(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": 7, "text": "dogs"}, {"id": "x", "text": "cats"}])
    columns, _, rows = read(tmp_path / "made", path=str(path))
    assert columns.id == "id"
    assert [row["id"] for row in rows] == ["7", "x"]
    path = write(tmp_path / "b.jsonl", [{"_id": "1", "text": "dogs"}])
    assert read(tmp_path / "made", path=str(path))[0].id == "_id"
    path = write(tmp_path / "c.jsonl", [{"text": "dogs"}, {"text": "dogs"}])
    columns, _, rows = read(tmp_path / "made", path=str(path))
    assert columns.id is None
    assert rows[0]["id"] == rows[1]["id"]
    assert len(rows[0]["id"]) == 32


def test_the_corpus_of_a_folder_in_beirs_layout_is_read_alone(tmp_path):
    write(tmp_path / "corpus.jsonl", [{"_id": "1", "title": "t", "text": "dogs"}])
    write(tmp_path / "queries.jsonl", [{"_id": "q", "text": "cats"}])
    _, _, rows = read(tmp_path / "made", path=str(tmp_path), text="title+text")
    assert [(row["id"], row["text"]) for row in rows] == [("1", "t dogs")]


def test_text_files_are_documents_named_by_their_paths(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("dogs")
    (folder / "sub" / "b.txt").write_text("cats")
    _, _, rows = read(tmp_path / "made", path=str(folder))
    assert [row["id"] for row in rows] == ["a.txt", "sub/b.txt"]


def test_rows_without_a_usable_document_are_rejected_with_reasons(tmp_path):
    lines = [
        json.dumps({"id": "1", "text": "dogs"}),
        json.dumps({"id": "2", "text": " \u200b"}),
        json.dumps({"id": "3", "text": ["a"]}),
        json.dumps({"text": "no id"}),
        json.dumps({"id": "a\0b", "text": "cats"}),
        json.dumps({"id": "5", "text": "big", "year": 2**70}),
        json.dumps({"id": "6", "text": "a\0b"}),
        json.dumps({"id": "7", "text": "year as text", "tag": "a\0"}),
        "{broken",
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    _, results, rows = read(tmp_path / "made", path=str(path), metadata=["year", "tag"])
    assert [row["id"] for row in rows] == ["1"]
    found = results[0]
    assert found["rows_in"] == 9
    assert found["rejected"] == {
        "no text": 1,
        "column 'text' is not a text": 1,
        "no id": 1,
        "an id with a NUL character": 1,
        "a number in 'year' beyond 64 bits": 1,
        "a text with a NUL character": 1,
        "a text in 'tag' with a NUL character": 1,
        "not JSON": 1,
    }
    assert len(found["examples"]) == 8
    with pytest.raises(DataError, match=r"8 of 9 rows have no usable document.*max_rejected_share"):
        accept(parse(Documents, {"path": str(path)}), results)
    allowed = parse(Documents, {"path": str(path), "max_rejected_share": 0.9})
    assert accept(allowed, results)[0] == 9


def test_a_file_without_documents_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": ""}])
    _, results, _ = read(tmp_path / "made", path=str(path))
    with pytest.raises(DataError, match="has no document in 1 rows: 1 × no text"):
        accept(parse(Documents, {"path": str(path)}), results)
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    _, results, _ = read(tmp_path / "made", path=str(path))
    with pytest.raises(DataError, match="has no document in 0 rows; check"):
        accept(parse(Documents, {"path": str(path)}), results)


def test_metadata_have_one_type_over_all_files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "a.jsonl", [{"text": "a", "n": 1, "s": None}, {"text": "b", "n": None}])
    write(folder / "b.jsonl", [{"text": "c", "n": 2.5, "s": ["x", "y"], "e": None}])
    columns, results, rows = read(tmp_path / "made", path=str(folder), metadata=["n", "s"])
    assert metadata_types(columns, results) == {"n": "double", "s": "list of texts"}
    assert rows[2]["s"] == ["x", "y"]
    assert metadata_types(columns, results, {"n": "double", "s": "list of texts"})["n"] == "double"
    with pytest.raises(DataError, match=r"'n' holds values of several types: int64 in the index"):
        metadata_types(columns, results, {"n": "int64", "s": "list of texts"})
    write(folder / "c.jsonl", [{"text": "d", "n": "two"}])
    columns, results, _ = read(tmp_path / "made2", path=str(folder), metadata=["n"])
    with pytest.raises(DataError, match=r"int64 in a.jsonl@0, double in b.jsonl@0, string in c"):
        metadata_types(columns, results)
    write(folder / "d.jsonl", [{"text": "d", "n": 1}, {"text": "e", "n": "two"}])
    with pytest.raises(DataError, match=r"int64 in d.jsonl@0, string in d.jsonl@"):
        read(tmp_path / "made3", path=str(folder / "d.jsonl"), metadata=["n"])


def test_dates_come_through_and_objects_are_refused(tmp_path):
    zone = datetime.timezone(datetime.timedelta(hours=2))
    at = datetime.datetime(2026, 1, 2, 3, tzinfo=zone)
    table = pa.table(
        {"text": ["a"], "day": [at.date()], "at": [at], "o": [{"name": "n"}], "t": [True]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    columns, results, rows = read(
        tmp_path / "made", path=path, metadata=["day", "at", "t", "o.name"]
    )
    assert metadata_types(columns, results) == {
        "day": "date",
        "at": "timestamp with zone",
        "t": "bool",
        "o_name": "string",
    }
    assert rows[0]["at"] == at
    assert rows[0]["o_name"] == "n"
    with pytest.raises(DataError, match=r"'o' holds .*\(dict\).* such as o.name"):
        read(tmp_path / "made2", path=path, metadata=["o"])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["text"], "'text' would be stored as 'text': the store has a column of that name"),
        (["a.b", "a_b"], "'a_b' would be stored as 'a_b': given twice"),
        (["years"], "did you mean 'year'"),
    ],
)
def test_metadata_columns_are_checked_first(tmp_path, columns, message):
    row = {"text": "a", "year": 1, "a": {"b": 1}, "a_b": 1}
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "made", path=str(path), metadata=columns)


class Pretrained:
    """A tokenizer of a model, as far as pieces need it."""

    def __init__(self, room=100):
        self.pretrained = wordpiece_tokenizer()
        self.pretrained.backend_tokenizer.no_truncation()
        self.pretrained.backend_tokenizer.no_padding()
        self._room = room

    def budget(self, role):
        return self._room

    def num_prompt_tokens(self, prompt):
        return len(prompt.split())

    def count(self, text):
        return len(self.pretrained.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def pieces(text, **settings):
    tokenizer = Pretrained()
    made = splitter(parse(Chunks, settings), tokenizer)([text, "Dogs."])
    assert made[1] == ["Dogs."]
    assert all(tokenizer.count(one) <= settings["size"] for one in made[0])
    return made[0]


def test_pieces_by_tokens_overlap_and_cover_the_text():
    text = "dogs live in ancient places and paris is the capital of the world"
    made = pieces(text, by="tokens", size=5)
    assert " ".join(made).split() == text.split()
    text = " ".join(["the capital of the world is paris"] * 6)
    overlapping = pieces(text, by="tokens", size=12, overlap=6)
    assert len(overlapping) > len(pieces(text, by="tokens", size=12))
    for first, second in itertools.pairwise(overlapping):
        assert second.split()[0] in first.split()
        assert first.split()[-1] in second.split()
    assert "".join(pieces("w" * 40, by="tokens", size=5)) == "w" * 40


def test_pieces_by_sentences_are_whole_sentences():
    text = "Dogs live. Paris is the capital. Foxes live in places. The world. Dogs."
    made = pieces(text, by="sentences", size=14)
    assert " ".join(made) == text
    assert all(one.endswith(".") for one in made)
    made = pieces(text, by="sentences", size=18)
    overlapping = pieces(text, by="sentences", size=18, overlap=10)
    assert len(overlapping) >= len(made) > 1
    assert overlapping[1].startswith(made[0].rpartition(". ")[2])
    long = " ".join(["dogs"] * 40) + "."
    assert len(pieces(long, by="sentences", size=14)) >= 3


def test_pieces_by_headings_keep_the_lead_and_repeat_the_heading():
    text = (
        "Paris is the capital.\n\n## Dogs\nDogs live in places.\n\n## World\n" + "The world. " * 12
    )
    made = pieces(text, by="headings", size=16)
    assert made[0] == "Paris is the capital."
    assert made[1] == "Dogs\nDogs live in places."
    assert len(made) > 3
    assert all(one.startswith("World\nThe world.") for one in made[2:])


def test_pieces_that_the_model_would_cut_are_refused():
    settings = parse(Chunks, {"by": "tokens", "size": 99})
    with pytest.raises(ConfigError, match=r"size=99, but the model reads at most 98 tokens"):
        check_size(settings, Pretrained(), "two words")
    check_size(settings, Pretrained(), "word")
    with pytest.raises(ConfigError, match="overlap 9 must be below size 9"):
        parse(Chunks, {"by": "tokens", "size": 9, "overlap": 9})
