"""Overlap with benchmarks: BM25 by hand, planted texts, mteb's task classes without a network."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.clustering import AbsTaskClustering
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from rayembed.config.mining import Containment, Overlap
from rayembed.data.cleaning import evaluation_texts as contained
from rayembed.data.cleaning.bm25 import FEWEST_WORDS, open_index, write_index
from rayembed.data.cleaning.evaluation_texts import GramIndex, find_sources, grams_of, read_texts
from rayembed.data.cleaning.overlap import FoundOverlap, find_overlap, overlap_identity
from rayembed.data.engine.parts import write_part
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.records import Negative, Record
from rayembed.errors import AssetError, ConfigError, DataError


def made_up(count: int, seed: int, longest: int = 14) -> list[str]:
    """Texts of words as frequent as in a language: the k-th has a share of 1/k."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 301)
    lengths = rng.integers(1, longest, count)
    return [" ".join(f"w{i}" for i in rng.choice(300, n, p=share / share.sum())) for n in lengths]


def similarities(text: str, evaluation: Sequence[str]) -> list[float]:
    """The definition in the module's docstring, with Lucene's BM25 (k1 1.5, b 0.75)."""
    split = [re.findall(r"\w+", e.lower()) for e in evaluation]
    mean = sum(map(len, split)) / len(split)
    having = Counter(word for other in split for word in set(other))
    ours = set(re.findall(r"\w+", text.lower()))
    found = []
    for other in split:
        norm = 1.5 * (1 - 0.75 + 0.75 * len(other) / mean)
        weights = {
            word: math.log(1 + (len(split) - having[word] + 0.5) / (having[word] + 0.5))
            * count
            / (count + norm)
            for word, count in Counter(other).items()
        }
        share = sum(w for word, w in weights.items() if word in ours) / sum(weights.values())
        too_few = len(weights) < FEWEST_WORDS
        found.append(0.0 if too_few else share * min(1.0, len(weights) / len(ours)))
    return found


@pytest.mark.parametrize("above", [0.53, 0.81])
def test_matches_equal_the_definition(above: float, tmp_path: Path) -> None:
    evaluation = list(dict.fromkeys(made_up(150, 0)))
    texts = made_up(150, 1, 20) + evaluation[:10]
    rng = np.random.default_rng(2)
    for text in evaluation[::3]:  # some words of an evaluation text, and some more
        split = text.split()
        kept = [w for w in split if rng.random() < 0.9]
        texts.append(" ".join([*kept, *made_up(1, int(rng.integers(1000)), 4)]))
    write_index(str(tmp_path), [("here", evaluation)])
    found = open_index(str(tmp_path), above).match(texts)
    plain = {e: i for i, e in enumerate(evaluation)}
    kinds = Counter()
    for text, match in zip(texts, found, strict=True):
        if text in plain:
            assert match is not None
            assert (match.place, match.similarity) == (plain[text], 1.0)
            kinds["equal"] += 1
            continue
        values = similarities(text, evaluation)
        best = max(values)
        assert abs(best - above) > 1e-5, "rounding would decide"
        if best <= above:
            assert match is None
            kinds["other"] += 1
        else:
            assert match is not None
            assert match.similarity == pytest.approx(best, abs=1e-5)
            assert values[match.place] == pytest.approx(best, abs=1e-6)
            kinds["similar"] += 1
    assert min(kinds["equal"], kinds["similar"], kinds["other"]) > 3, kinds


def test_at_the_limit_itself_rounding_does_not_decide(tmp_path: Path) -> None:
    """Five words that have all four of an evaluation text: similarity 0.8, which is not above."""
    evaluation = [f"alpha{i} beta{i % 3} gamma{i % 5} delta{i % 7}" for i in range(50)]
    write_index(str(tmp_path), [("here", evaluation)])
    texts = [f"{text} more" for text in evaluation]
    assert open_index(str(tmp_path), 0.8).match(texts) == [None] * 50
    found = open_index(str(tmp_path), 0.79).match(texts)
    assert [match and match.place for match in found] == list(range(50))


QUESTIONS = [
    "What is the largest lake of the Southern Alps in winter?",
    "How do bees find their way back to the hive?",
    "Which treaty ended the war between the two kingdoms?",
    "Thank you!",
]


def test_planted_texts_go_and_unrelated_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("\n".join(QUESTIONS))
    long_document = " ".join([*QUESTIONS[1].split(), *made_up(1, 3, 400), *made_up(30, 4)])
    rows = {
        "equal": (" what is the  LARGEST lake of the Southern Alps in winter? ", "some lake"),
        "an edit": ("How do honey bees find their way back to the hive", "they dance"),
        "a positive": ("a peace", "Which treaty ended the war between these two kingdoms?"),
        "short and equal": ("thank YOU!", "you are welcome"),
        "short and alike": ("Thank you", "you are welcome"),
        "another question": ("How do birds find their way home?", "by the stars"),
        "all its words and many others": ("where is it?", long_document),
        "half of it": ("bees find their way", "home"),
    }
    records = [Record(name, *texts(row), "d", origin=(f"f#{name}",)) for name, row in rows.items()]
    gone = {
        "equal": (QUESTIONS[0], 1.0),
        "an edit": (QUESTIONS[1], 0.8),
        "a positive": (QUESTIONS[2], 0.8),
        "short and equal": (QUESTIONS[3], 1.0),
    }
    for rows_per_part in (3, 8):
        folder = tmp_path / str(rows_per_part)
        found = find(folder, records, rows_per_part, Overlap(tasks=("questions.txt",)), tmp_path)
        assert [records[i].id for i in found] == list(gone)
        listed = {row["id"]: row for row in pq.read_table(folder / "removed").to_pylist()}
        assert sorted(listed) == sorted(gone)
        for name, (text, least) in gone.items():
            row = listed[name]
            assert row["matched"] == "questions.txt"
            assert (row["matched_text"], row["reason"]) == (text, "text of a benchmark")
            assert least <= row["similarity"] <= 1.0
            assert (row["query"], row["positive"]) == rows[name]
            assert row["origin"] == [f"f#{name}"]
    exact = Overlap(tasks=("questions.txt",), max_similarity=None)
    found = find(tmp_path / "exact", records, 3, exact, tmp_path)
    assert [records[i].id for i in found] == ["equal", "short and equal"]


def test_contained_texts_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sets of tuples of words; benchmark texts of 1 to 12 words, texts of up to 40."""
    evaluation = list(dict.fromkeys(made_up(300, 0, 13)))
    rng = np.random.default_rng(1)
    documents = made_up(200, 2, 40)
    for text in evaluation[::4]:  # planted as they are, and with a word changed
        before, after, split = *made_up(2, int(rng.integers(1000)), 20), text.split()
        split[int(rng.integers(len(split)))] = "other"
        documents += [f"{before}. {text.upper()}! {after}", f"{before} {' '.join(split)} {after}"]
    documents += ["", "w1"]
    settings = Containment(ngram=7, shortest=4)

    def grams(text: str, length: int) -> set[tuple[str, ...]]:
        split = re.findall(r"\w+", text.lower())
        return {tuple(split[i : i + length]) for i in range(len(split) - length + 1)}

    lengths = [len(text.split()) for text in evaluation]
    wanted = []
    for document in documents:
        found = [
            place
            for place, (text, length) in enumerate(zip(evaluation, lengths, strict=True))
            if length >= 4 and grams(text, min(length, 7)) & grams(document, min(length, 7))
        ]
        wanted.append(min(found, default=-1))
    index = GramIndex(grams_of(evaluation, settings))
    assert index.find(documents).tolist() == wanted
    assert 50 < sum(place >= 0 for place in wanted) < len(documents) - 50
    assert index.find([]).tolist() == []
    monkeypatch.setattr(contained, "_TEXTS_AT_ONCE", 7)
    assert GramIndex(grams_of(evaluation, settings)).find(documents).tolist() == wanted
    invisible = ["".join(f"{letter}\u00ad\u200b" for letter in text) for text in documents]
    assert index.find(invisible).tolist() == wanted
    assert GramIndex(grams_of(["too short"], settings)).find(documents[:3]).tolist() == [-1] * 3


def test_texts_within_longer_ones_go_and_negatives_with_them(tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("\n".join(QUESTIONS))
    before, after, other = (" ".join(made_up(8, seed, 30)) for seed in (1, 2, 3))
    within = f"{before} — {QUESTIONS[1].upper().replace(' ', '  ')} {after}"
    edited = f"{before} {QUESTIONS[1].replace('find', 'seek')} {after}"
    rows = {
        "in a positive": ("a hive", within, [other]),
        "in a query": (f"{before} {QUESTIONS[2]}", "peace", []),
        "a word changed": ("a nest", edited, [other]),
        "too short": ("thanks", f"{before} {QUESTIONS[3]} {after}", []),
        "in negatives": ("a bee", other, [other + " x", within, QUESTIONS[0], after]),
    }
    records = [
        Record(name, query, (positive,), "d", tuple(map(Negative, negatives)))
        for name, (query, positive, negatives) in rows.items()
    ]
    looks = Overlap(tasks=("questions.txt",), contained=Containment(), negatives=True)
    found = find_all(tmp_path / "x", records, 2, looks, tmp_path)
    assert [records[i].id for i in found.rows.positions] == ["in a positive", "in a query"]
    assert found.contained == 2
    assert found.negatives.tolist() == [[4, 1], [4, 2]]
    listed = {row["id"]: row for row in pq.read_table(tmp_path / "x/removed").to_pylist()}
    row = listed["in a positive"]
    assert (row["reason"], row["similarity"]) == ("contains a text of a benchmark", 1.0)
    assert (row["matched"], row["matched_text"]) == ("questions.txt", QUESTIONS[1])
    plain = find_all(tmp_path / "y", records, 2, Overlap(tasks=("questions.txt",)), tmp_path)
    assert (plain.rows.positions.tolist(), plain.negatives.tolist()) == ([], []), "the control"


def texts(row: tuple[str, str]) -> tuple[str, tuple[str, ...]]:
    return row[0], ("something else", row[1])[::-1]


def find(
    folder: Path,
    records: Sequence[Record],
    rows_per_part: int,
    config: Overlap,
    root: Path,
    execute: Execute = in_process,
) -> list[int]:
    found = find_all(folder, records, rows_per_part, config, root, execute)
    return found.rows.positions.tolist()


def find_all(
    folder: Path,
    records: Sequence[Record],
    rows_per_part: int,
    config: Overlap,
    root: Path,
    execute: Execute = in_process,
) -> FoundOverlap:
    starts = range(0, len(records), rows_per_part)
    parts = [write_part(str(folder / "parts"), records[i : i + rows_per_part]) for i in starts]
    keep = np.ones(len(records), dtype=bool)
    working = str(folder / "working")
    return find_overlap(str(folder), working, "d", config, str(root), parts, keep, execute)


def test_files_of_all_kinds_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one text\n\nanother text\n")
    (tmp_path / "b.jsonl").write_text('{"text": "third text"}\n{"text": null, "more": 1}\n')
    pq.write_table(pa.table({"text": ["fourth text"]}), tmp_path / "c.parquet")
    names = ["a.txt", str(tmp_path / "b.jsonl"), "c.parquet"]
    sources = find_sources(names, str(tmp_path))
    found = [text for source in sources for text in read_texts(source) if text]
    assert found == ["one text", "another text", "third text", "fourth text"]
    before = overlap_identity(Overlap(tasks=("a.txt",)), str(tmp_path))
    (tmp_path / "a.txt").write_text("one text\n")
    assert overlap_identity(Overlap(tasks=("a.txt",)), str(tmp_path)) != before
    for name, content in (("d.jsonl", b'{"query": "x"}'), ("e.parquet", b"x"), ("f.txt", b"\xff")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"cannot read texts from .*{name}"):
            list(read_texts(find_sources([name], str(tmp_path))[0]))
    for name, content in (("g.txt", "\n \n"), ("h.jsonl", '{"text": null}'), ("i.txt", "")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=rf"{name}.* the file has no text"):
            list(read_texts(find_sources([name], str(tmp_path))[0]))
    with pytest.raises(ConfigError, match=r"'SciFct'.* did you mean 'SciFact'\?"):
        find_sources(["SciFct"], str(tmp_path))


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("\n".join(QUESTIONS))
    records = [Record(f"d/{i}", q, ("an answer",), "d") for i, q in enumerate(QUESTIONS)]
    done: list[Any] = []

    def counts(task, units, needs):
        for unit in units:
            done.append(unit)
            yield task(unit)

    config = Overlap(tasks=("q.txt",))
    assert find(tmp_path / "x", records, 2, config, tmp_path, counts) == [0, 1, 2, 3]
    assert len(done) == 2
    assert find(tmp_path / "x", records, 2, config, tmp_path, counts) == [0, 1, 2, 3]
    assert len(done) == 2


# --- mteb's classes, with data of our own in place of the hub's ---


def metadata(name: str, kind: str, **changes: Any) -> TaskMetadata:
    values = {
        "name": name,
        "description": "Made up.",
        "type": kind,
        "category": "t2t",
        "main_score": "accuracy",
        "dataset": {"path": "made-up/data", "revision": "1"},
        "reference": None,
        "eval_splits": ["test"],
        "eval_langs": ["eng-Latn"],
        "date": None,
        "domains": None,
        "task_subtypes": None,
        "license": None,
        "annotations_creators": None,
        "dialect": None,
        "sample_creation": None,
        "bibtex_citation": None,
    }
    return TaskMetadata(**(values | changes))


def table(name: str, **columns: list[Any]) -> Dataset:
    return Dataset.from_dict({c: [f"{name} {v}" for v in vs] for c, vs in columns.items()})


class Questions(AbsTaskRetrieval):
    metadata = metadata("Questions", "Retrieval", main_score="ndcg_at_10")

    def load_data(self, num_proc=None, **options):
        def split(name: str) -> dict[str, Any]:
            return {
                "queries": table(name, id=[1], text=["question"]),
                "corpus": table(name, id=[1], title=["title"], text=["document"]),
                "relevant_docs": {},
                "top_ranked": None,
            }

        self.dataset = {"default": {"test": split("test"), "train": split("train")}}


class Dialogues(AbsTaskRetrieval):
    metadata = metadata("Dialogues", "Retrieval", main_score="ndcg_at_10")

    def load_data(self, num_proc=None, **options):
        turns = [{"role": "user", "content": "first turn"}, {"role": "system", "content": "second"}]
        queries = Dataset.from_dict({"id": ["1"], "text": [turns]})
        self.dataset = {"default": {"test": {"queries": queries}}}


class Classes(AbsTaskClassification):
    metadata = metadata(
        "Classes", "Classification", eval_langs={"en": ["eng-Latn"], "de": ["deu-Latn"]}
    )
    input_column_name = "sentence"

    def load_data(self, num_proc=None, **options):
        self.dataset = {
            subset: DatasetDict(
                {
                    split: table(f"{subset} {split}", sentence=["text"], label=["class"])
                    for split in ("train", "test")
                }
            )
            for subset in ("en", "de")
        }


class Clusters(AbsTaskClustering):
    metadata = metadata("Clusters", "Clustering", main_score="v_measure")

    def load_data(self, num_proc=None, **options):
        rows = {"sentences": [["one", "two"], ["three"]], "labels": [["a", "b"], ["a"]]}
        self.dataset = DatasetDict({"test": Dataset.from_dict(rows)})


class Pairs(AbsTaskSTS):
    metadata = metadata("Pairs", "STS", main_score="cosine_spearman")

    def load_data(self, num_proc=None, **options):
        rows = {"sentence1": ["left"], "sentence2": ["right"], "genre": ["news"], "score": [1.0]}
        self.dataset = DatasetDict({"test": Dataset.from_dict(rows)})


class Missing(Pairs):
    metadata = metadata("Missing", "STS", main_score="cosine_spearman")

    def load_data(self, num_proc=None, **options):
        raise ConnectionError("no hub here")


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {c.metadata.name: c for c in (Questions, Dialogues, Classes, Clusters, Pairs, Missing)}
    monkeypatch.setattr(mteb, "get_task", lambda name: known[name]())


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Questions", ["test question"]),
        ("Dialogues", ["first turn", "second"]),
        ("Classes", ["en test text", "de test text"]),
        ("Clusters", ["one", "two", "three"]),
        ("Pairs", ["left", "right"]),
    ],
)
def test_texts_of_tasks(name: str, wanted: list[str], tasks: None) -> None:
    (source,) = find_sources([name], "")
    assert source.name == name
    assert source.version.startswith("made-up/data@1: test of ")
    assert sorted(read_texts(source)) == sorted(wanted)


def test_rows_with_texts_of_a_task_go(tasks: None, tmp_path: Path) -> None:
    records = [
        Record("a", "Test question", ("an answer",), "d"),
        Record("b", "anything", ("test document",), "d"),
        Record("c", "train question", ("an answer",), "d"),
    ]
    config = Overlap(tasks=("Questions", "Pairs"))
    assert find(tmp_path, records, 2, config, tmp_path) == [0]
    (row,) = pq.read_table(tmp_path / "removed").to_pylist()
    assert (row["matched"], row["matched_text"]) == ("Questions", "test question")
    assert json.dumps(overlap_identity(config, ""))


def test_a_benchmark_names_its_tasks_and_a_task_that_cannot_be_loaded_is_told(tasks: None) -> None:
    named = [source.name for source in find_sources(["MTEB(eng, v2)"], "")]
    assert {"ArguAna", "STS12", "TwentyNewsgroupsClustering.v2"} <= set(named)
    with pytest.raises(AssetError, match="'Missing': no hub here"):
        list(read_texts(find_sources(["Missing"], "")[0]))
