"""The user's own tables of texts as tasks of mteb."""

import gc
import json
import math
import pickle
from itertools import combinations

import mteb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from garbling import damaged
from mteb.abstasks.abstask import get_abstask_prompt
from mteb.abstasks.clustering import AbsTaskClustering
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score
from word_encoder import WordEncoder, word_vectors

from rayembed.config.own_sets import ClusteringSet, RetrievalSet, Scores
from rayembed.config.settings import parse
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation import own_set
from rayembed.evaluation.own_set import OwnTask

TOPICS = {
    "animals": ("cat", "dog", "horse", "cow", "sheep", "goat", "wolf"),
    "food": ("bread", "cheese", "apple", "soup", "rice", "bean", "onion"),
    "trains": ("track", "signal", "station", "rail", "engine", "wagon", "bridge"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    own_set._written_tables.cache_clear()
    yield
    own_set._written_tables.cache_clear()


def sentences(topic, first, last):
    words = TOPICS[topic]
    return [f"{a} {b}" for a, b in list(combinations(words, 2))[first:last]]


def class_rows(first, last):
    return [{"text": t, "label": topic} for topic in TOPICS for t in sentences(topic, first, last)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def task_of(kind, **settings) -> OwnTask:
    """The task as a run's settings name it."""
    values = {"own_sets": [{"kind": kind, "name": "Own", **settings}]}
    return OwnTask(parse(Scores, values).own_sets[0])


def score_of(own: OwnTask) -> mteb.TaskResult:
    task = pickle.loads(pickle.dumps(own)).load()
    done = mteb.evaluate(
        WordEncoder(), task, cache=None, co2_tracker=False, show_progress_bar=False
    )
    return done.task_results[0]


def test_classes_are_told_from_the_training_file(tmp_path):
    test, train = class_rows(12, 22), class_rows(0, 12)
    settings = {"path": lines(tmp_path / "test.jsonl", test)}
    own = task_of(
        "classification",
        **settings,
        train=lines(tmp_path / "train.jsonl", train),
        samples_per_label=6,
        experiments=3,
    )
    result = score_of(own)
    assert result.scores["test"][0]["main_score"] == result.scores["test"][0]["accuracy"] > 0.6
    assert len(result.scores["test"][0]["scores_per_experiment"]) == 3
    assert own.num_texts == len(test) + len(train)
    # Control: with the classes of the training rows turned, the same texts are told wrongly.
    following = dict(zip(TOPICS, [*list(TOPICS)[1:], "animals"], strict=True))
    turned = [{**row, "label": following[row["label"]]} for row in train]
    wrong = task_of("classification", **settings, train=lines(tmp_path / "other.jsonl", turned))
    assert score_of(wrong).get_score() < 0.4


def test_texts_are_grouped_by_class(tmp_path):
    path = lines(tmp_path / "texts.jsonl", class_rows(0, 20))
    own = task_of("clustering", path=path, experiments=4, documents_per_experiment=100)
    result = score_of(own)
    assert len(result.scores["test"][0]["v_measures"]["Level 0"]) == 4
    mixed = [{**row, "label": str(number % 3)} for number, row in enumerate(class_rows(0, 20))]
    control = task_of("clustering", path=lines(tmp_path / "mixed.jsonl", mixed))
    assert score_of(control).get_score() < 0.2 < result.get_score()


def pair_rows(last, values):
    firsts = [text for topic in TOPICS for text in sentences(topic, 0, 4)]
    seconds = [text for topic in TOPICS for text in sentences(topic, 2, 6)]
    return [
        {"sentence1": a, "sentence2": b, last: value}
        for a, b, value in zip(firsts, seconds, values, strict=True)
    ]


def similarities(rows):
    first, second = (
        word_vectors([row[name] for row in rows]) for name in ("sentence1", "sentence2")
    )
    return (
        (first * second).sum(axis=1)
        / np.linalg.norm(first, axis=1)
        / np.linalg.norm(second, axis=1)
    )


def test_pairs_are_scored_by_average_precision(tmp_path):
    rows = pair_rows("label", [1, 0, 1, 1, 0, 0] * 2)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    own = task_of("pair_classification", path=str(tmp_path / "pairs.parquet"))
    result = score_of(own).scores["test"][0]
    expected = average_precision_score([row["label"] for row in rows], similarities(rows))
    assert result["cosine_ap"] == pytest.approx(expected, abs=1e-5)
    assert result["main_score"] == result["max_ap"]


def test_grades_are_compared_by_rank_on_any_scale(tmp_path):
    grades = [3, 0, 1.5, 2, 0.5, 1, 3, 2.5, 0, 1, 2, 0.25]
    rows = pair_rows("score", grades)
    table = "".join(f"{r['sentence1']}\t{r['sentence2']}\t{r['score']}\n" for r in rows)
    (tmp_path / "sts.tsv").write_text("sentence1\tsentence2\tscore\n" + table)
    expected = spearmanr(grades, similarities(rows)).statistic
    result = score_of(task_of("sts", path=str(tmp_path / "sts.tsv"))).scores["test"][0]
    assert result["main_score"] == result["cosine_spearman"] == pytest.approx(expected, abs=1e-5)
    scaled = pair_rows("score", [100 * grade - 7 for grade in grades])
    other = task_of("sts", path=lines(tmp_path / "scaled.jsonl", scaled))
    assert score_of(other).get_score() == pytest.approx(expected, abs=1e-5)
    assert not math.isnan(expected)


def test_data_settings_and_instruction_name_the_revision(tmp_path):
    path = lines(tmp_path / "texts.jsonl", class_rows(0, 20))
    other = lines(tmp_path / "other.jsonl", class_rows(0, 19))
    told = [
        task_of("clustering", path=where, **settings).load().metadata.revision
        for where, settings in (
            (path, {}),
            (other, {}),
            (path, {"instruction": "Identify the topic"}),
            (path, {"experiments": 3}),
        )
    ]
    assert len(set(told)) == 4
    again = lines(tmp_path / "again.jsonl", class_rows(0, 20))
    assert task_of("clustering", path=again).load().metadata.revision == told[0]


@pytest.mark.parametrize("name", ["test.arrow", "train.arrow", "about.json"])
def test_a_flipped_bit_in_the_cache_is_not_scored(tmp_path, name):
    own = task_of(
        "classification",
        path=lines(tmp_path / "test.jsonl", class_rows(12, 20)),
        train=lines(tmp_path / "train.jsonl", class_rows(0, 12)),
    )

    def content():
        own_set._written_tables.cache_clear()  # another process
        task = own.load()
        task.load_data()
        splits = {split: rows.to_dict() for split, rows in task.dataset.items()}
        return task.metadata.dataset["revision"], splits

    wanted = content()
    (file,) = (tmp_path / "cache" / "own-sets").glob(f"*/files/{name}")
    whole = file.read_bytes()
    for place in range(10):
        file.unlink()  # what is mapped stays as it is
        file.write_bytes(damaged(whole, "flip", f"{name} {place}"))
        assert content() == wanted
        assert file.read_bytes() == whole, "it is made anew"


def test_models_with_a_template_find_the_general_words_of_the_kind(tmp_path):
    path = lines(tmp_path / "texts.jsonl", class_rows(0, 20))
    own = OwnTask(parse(ClusteringSet, {"name": "OwnGroups", "path": path}))
    name = own.load().metadata.name
    gc.collect()  # mteb holds no class
    assert get_abstask_prompt(name) == AbsTaskClustering.abstask_prompt != ""


def test_all_bad_rows_are_counted_with_the_first_examples(tmp_path):
    rows = [
        *pair_rows("label", [1, 0] * 6),
        {"sentence1": "a", "sentence2": "b", "label": 2},
        {"sentence1": "a", "sentence2": "b", "label": 0.5},
        {"sentence1": " ", "sentence2": "b", "label": 1},
        {"sentence1": "a", "label": 1},
        {"sentence1": "a", "sentence2": "b", "label": None},
        ["a", "b", 1],
    ]
    path = tmp_path / "pairs.jsonl"
    lines(path, rows)
    path.write_text(path.read_text() + "no JSON\n")
    with pytest.raises(DataError) as caught:
        task_of("pair_classification", path=str(path)).load()
    for line in (
        "cannot be scored as they stand",
        "2 × test: label must be 0 or 1 (pairs.jsonl@",
        "1 × test: no sentence1 (pairs.jsonl@",
        "1 × test: the row has no column 'sentence2'",
        "1 × test: no label",
        "1 × test: the row has no column 'sentence1'",
        "1 × test: not JSON",
    ):
        assert line in str(caught.value)


def test_data_that_cannot_give_a_score_are_refused(tmp_path):
    def refused(kind, message, rows, **settings):
        path = lines(tmp_path / f"{len(message)}.jsonl", rows)
        with pytest.raises(DataError, match=message):
            task_of(kind, path=path, **settings).load()

    train = lines(tmp_path / "train.jsonl", class_rows(0, 3)[:6])
    refused("classification", "1 classes without a training", class_rows(3, 6), train=train)
    refused("clustering", "have the class 'animals'", class_rows(0, 3)[:3])
    refused("sts", "all rows .* have the same score, 1.0", pair_rows("score", [1] * 12))
    refused(
        "pair_classification", "all rows .* have the same label, 0", pair_rows("label", [0] * 12)
    )
    refused("sts", "there are no rows", [])


def test_a_set_without_a_kind_is_of_retrieval_and_unknown_ones_are_told():
    scores = parse(Scores, {"own_sets": [{"name": "Own", "path": "somewhere"}]})
    assert isinstance(scores.own_sets[0], RetrievalSet)
    with pytest.raises(
        ConfigError, match=r"own_sets.Own.kind = 'clusterin'.*did you mean 'clustering'"
    ):
        parse(Scores, {"own_sets": [{"kind": "clusterin", "name": "Own", "path": "x"}]})


def test_queries_of_several_languages_are_parts_of_one_task(tmp_path):
    """The score is the mean of the languages, each over its own documents."""
    for code, grade in (("fra-Latn", 1), ("spa-Latn", 0)):
        folder = tmp_path / "set" / code
        (folder / "qrels").mkdir(parents=True)
        lines(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": f"cat dog{n}"} for n in range(3)])
        lines(folder / "queries.jsonl", [{"_id": "q", "text": f"cat dog{2 * grade}"}])
        (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td2\t1\n")
    own = task_of("retrieval", path=str(tmp_path / "set"), languages=["fra-Latn", "spa-Latn"])
    result = score_of(own)
    by_language = {row["hf_subset"]: row["main_score"] for row in result.scores["test"]}
    assert by_language["fra-Latn"] == 1.0 > by_language["spa-Latn"]
    assert result.get_score() == pytest.approx(sum(by_language.values()) / 2)
    with pytest.raises(ConfigError, match="has the language 'fr'"):
        task_of("retrieval", path=str(tmp_path / "set"), languages=["fr"]).load()
