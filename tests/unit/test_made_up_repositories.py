"""Made-up repositories of mteb's tasks in another size than tests of tasks have."""

import gzip
import io
import json

import pyarrow.parquet as pq
import pytest
from mteb_hub import repositories_of

from rayembed.evaluation.benchmarks import MtebTask


def rows_of(task, path, times):
    """Rows of a file of its repository."""
    (files,) = repositories_of([MtebTask(task).load()], times).values()
    content = files[path]
    if path.endswith(".parquet"):
        return pq.read_table(io.BytesIO(content)).to_pylist()
    content = gzip.decompress(content) if path.endswith(".gz") else content
    return [json.loads(line) for line in content.decode().splitlines()]


SHARD = "test-00000-of-00001"


@pytest.mark.parametrize(
    ("task", "path", "one", "three"),
    [
        ("NFCorpus", "corpus.jsonl", 30, 90),
        ("NFCorpus", "queries.jsonl", 7, 19),
        ("AskUbuntuDupQuestions", f"top_ranked/{SHARD}.parquet", 6, 18),
        ("STS12", "test.jsonl.gz", 24, 72),
        ("STS22", "test/en.jsonl.gz", 24, 72),
        ("SummEval", f"data/{SHARD}-35901af5f6649399.parquet", 4, 12),
        ("Banking77Classification", "train.jsonl", 144, 432),
        ("MTOPIntentClassification", f"en/{SHARD}.parquet", 32, 96),
        ("MassiveIntentClassification", "test/en.json.gz", 32, 96),
    ],
)
def test_sets_have_as_many_times_as_many_rows(task, path, one, three):
    assert len(rows_of(task, path, 1)) == one
    rows = rows_of(task, path, 3)
    assert len({json.dumps(row) for row in rows}) == three == len(rows)


@pytest.mark.parametrize(
    ("task", "column", "one", "three"),
    [
        ("SprintDuplicateQuestions", "sent1", 40, 120),
        ("TwentyNewsgroupsClustering", "sentences", 48, 144),
    ],
)
def test_sets_in_one_row_have_as_many_times_as_many_texts(task, column, one, three):
    assert len(rows_of(task, "test.jsonl.gz", 1)[0][column]) == one
    for row in rows_of(task, "test.jsonl.gz", 3):
        assert len(set(row[column])) == three


def test_judgements_of_larger_sets_name_their_documents():
    documents = {row["_id"] for row in rows_of("NFCorpus", "corpus.jsonl", 3)}
    judged = rows_of("NFCorpus", "qrels/test.jsonl", 3)
    assert {row["corpus-id"] for row in judged} <= documents
    relevant = [row for row in judged if row["score"] > 0]
    assert len({row["corpus-id"] for row in relevant}) > 8, "queries look for different ones"
    for row in rows_of("AskUbuntuDupQuestions", f"top_ranked/{SHARD}.parquet", 3):
        assert len(set(row["corpus-ids"])) == 16
