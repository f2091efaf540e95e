"""Test texts in the batch plan are counted, and scores without them are right."""

import csv
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from beir_set import write_beir
from planted_texts import CHANCE, WORDS, Words, like, plan_of, planted, text

from rayembed.config.own_sets import Scores
from rayembed.config.settings import parse
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.score import Store, score
from rayembed.pipeline.evaluate.findings import ComparedModels, ScoredModels
from rayembed_extras.clean_scores import search
from rayembed_extras.clean_scores.finding import clean_scores, compared_clean_scores

NUMBER, PLANTED = 200, 40

QUERIES = [text(9 + n % 12) for n in range(NUMBER)]
# What was trained on is easier: its score must come off.
DOCUMENTS = [like(query, 6 if n % 5 == 0 else 2) for n, query in enumerate(QUERIES)]
PAIRS = [(query, like(query, n % 9)) for n, query in enumerate(QUERIES)]
SEEN = [n for n in range(NUMBER) if n % 5 == 0]
assert len(SEEN) == PLANTED


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sets(folder, kept):
    """Own sets of four kinds over some of the items."""
    folder.mkdir()
    queries = {f"q{n:03}": QUERIES[n] for n in kept}
    documents = {f"d{n:03}": DOCUMENTS[n] for n in range(NUMBER)}
    judged = {f"q{n:03}": {f"d{n:03}": 1} for n in kept}
    write_beir(folder / "search", documents, queries, judged)
    classes = [{"text": f"{WORDS[n % 2]} {text(5)}", "label": "ab"[n % 2]} for n in range(16)]
    tested = [{"text": QUERIES[n], "label": "ab"[n % 2]} for n in kept]
    pairs = [{"sentence1": PAIRS[n][0], "sentence2": PAIRS[n][1]} for n in kept]
    graded = [row | {"score": n % 9 + (n * 37 % 5)} for n, row in zip(kept, pairs, strict=True)]
    same = [row | {"label": int(n % 9 > 4)} for n, row in zip(kept, pairs, strict=True)]
    return [
        {"kind": "retrieval", "name": "search", "path": str(folder / "search")},
        {
            "kind": "classification",
            "name": "classes",
            "path": write_rows(folder / "test.jsonl", tested),
            "train": write_rows(folder / "train.jsonl", classes),
        },
        {"kind": "sts", "name": "graded", "path": write_rows(folder / "graded.jsonl", graded)},
        {
            "kind": "pair_classification",
            "name": "same",
            "path": write_rows(folder / "same.jsonl", same),
        },
    ]


def scored_on(folder, kept, sets_of=sets):
    state = CHANCE.getstate()
    CHANCE.seed(1)  # the same examples of classes each time
    factories = task_factories(parse(Scores, {"own_sets": sets_of(folder, kept)}))
    CHANCE.setstate(state)
    return score(Words(), factories, partial(run_here, device="cpu"), Store(str(folder / "r")))


def found_in(scored, plan, folder):
    subject = ScoredModels({"m": scored}, "m", None, "/m", str(folder), plans={"s": plan})
    finding = clean_scores(subject)
    for name, content in finding.files.items():
        subject.write(name, content.encode())
    return finding


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    return scored_on(tmp_path_factory.mktemp("all") / "sets", range(NUMBER))


@pytest.fixture(scope="module")
def finding(scored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    return found_in(scored, plan_of(folder, planted([QUERIES[n] for n in SEEN])), folder)


def test_the_share_of_seen_items_is_what_was_planted(finding):
    assert set(finding.metrics["seen_share"]) == {"search", "classes", "graded", "same"}
    for task, share in finding.metrics["seen_share"].items():
        assert share == pytest.approx(PLANTED / NUMBER, abs=0.01), task


def test_the_clean_score_is_that_of_a_set_without_the_seen_items(finding, scored, tmp_path):
    without = scored_on(tmp_path / "sets", [n for n in range(NUMBER) if n not in SEEN])
    assert finding.metrics["clean"] == pytest.approx(without.scores, abs=1e-5)
    assert without.scores["search"] < scored.scores["search"] - 0.05, "it must matter"
    (search,) = [row for row in finding.table.rows if row[0] == "search"]
    low, high = (float(part) for part in search[-1].split("(")[1].rstrip(")").split(" to "))
    assert low < without.scores["search"] - scored.scores["search"] < high < 0


def test_seen_texts_are_listed_with_how_they_were_seen(finding):
    lines = finding.files["seen_texts.csv"].splitlines()
    of_search = [line.split(",") for line in lines if line.startswith("search,")]
    assert len(of_search) == PLANTED
    seen = [how for _, _, _, _, _, how, _ in of_search]
    assert (seen.count("equal"), seen.count("contained")) == (27, 13)


def test_without_planted_texts_nothing_is_seen_and_scores_stay(scored, tmp_path):
    finding = found_in(scored, plan_of(tmp_path, []), tmp_path)
    assert set(finding.metrics["seen_share"].values()) == {0.0}
    assert finding.metrics["clean"] == pytest.approx(scored.scores, abs=1e-5)
    assert finding.table is None
    assert "0 of 4 tasks have queries" in finding.lines[0]


def test_documents_and_positives_are_counted_apart_from_queries(scored, tmp_path):
    plan = plan_of(tmp_path, planted([DOCUMENTS[n] for n in SEEN[:20]]))
    finding = found_in(scored, plan, tmp_path)
    (search,) = finding.table.rows
    assert search[:5] == ["search", "200", "0.0 %", "10.0 %", "10.0 %"]


def test_a_text_that_shares_most_of_its_words_with_a_training_text_is_similar(scored, tmp_path):
    changed = [QUERIES[n].split() for n in SEEN if len(QUERIES[n].split()) > 15]
    texts = [" ".join([*words[:7], "other", *words[8:]]) for words in changed]
    finding = found_in(scored, plan_of(tmp_path, texts), tmp_path)
    rows = [line.split(",") for line in finding.files["seen_texts.csv"].splitlines()]
    similar = [row for row in rows if row[0] == "search" and row[5] == "similar"]
    assert len(similar) == len(texts)


def test_a_comparison_shows_clean_scores_beside_each_other(finding, scored, tmp_path):
    for name, content in finding.files.items():
        (scored.local / name).write_text(content)
    results = {"new": (str(scored.local),), "old": (str(tmp_path),)}
    made = compared_clean_scores(ComparedModels(results, "old", str(tmp_path)))
    (search,) = [row for row in made.table.rows if row[0] == "search"]
    assert search[1].value == pytest.approx(100 * finding.metrics["clean"]["search"])
    assert search[2] == "20.0 %"
    assert made.lines == ("No clean scores are known of old.",)
    nothing = ComparedModels({"old": (str(tmp_path),)}, None, str(tmp_path))
    assert compared_clean_scores(nothing) is None


def changed_by_a_word():
    long = [QUERIES[n].split() for n in SEEN if len(QUERIES[n].split()) > 15]
    return [" ".join([*words[:7], "other", *words[8:]]) for words in long]


def test_a_query_that_was_a_document_before_is_searched_in_all_ways(tmp_path):
    """The tasks that are scored along must not change what is clean."""
    inside = [QUERIES[n] for n in SEEN if len(QUERIES[n].split()) < 12]
    plan = plan_of(tmp_path, [*changed_by_a_word(), *(f"{text(30)} {one}" for one in inside)])
    alone = search.TestTexts([plan], str(tmp_path / "alone"))
    after = search.TestTexts([plan], str(tmp_path / "after"))
    numbers = alone.add([*QUERIES, *QUERIES[:9]])
    assert alone.count == NUMBER, "equal texts are searched once"
    after.add_documents([*DOCUMENTS, *reversed(QUERIES)])
    numbers_after = after.add([*QUERIES, *QUERIES[:9]])
    for one in (alone, after):
        one.search()
    expected = alone.matches[numbers]
    np.testing.assert_array_equal(after.matches[numbers_after], expected)
    assert {2, 3} <= set(expected.tolist()), "contained and similar ones are among them"


def test_blocks_of_any_size_find_the_same(scored, tmp_path, monkeypatch):
    """Texts are dropped after each block, and a task may lie in several."""
    plan = plan_of(tmp_path, planted([QUERIES[n] for n in SEEN]))
    whole = found_in(scored, plan, tmp_path)
    blocks, search_block = [], search._Block.search

    def counted(block, *args):
        blocks.append(block.first)
        return search_block(block, *args)

    monkeypatch.setattr(search._Block, "search", counted)
    monkeypatch.setattr(search, "_AT_ONCE", 64)
    for name, most in (("MOST_GRAMS", 100), ("MOST_CHARACTERS", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(search, name, most)
            again = found_in(scored, plan, tmp_path)
        assert again.metrics == whole.metrics
        assert again.files == whole.files
        assert len(blocks) > 6
        blocks.clear()


def test_a_file_whose_search_failed_is_searched_again(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, changed_by_a_word())
    similar, calls = search.EvaluationIndex.similar_pairs, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError("away for a moment")
        return similar(*args)

    monkeypatch.setattr(search.EvaluationIndex, "similar_pairs", fails_once)

    def again(task, items, needs="cpu"):
        for item in items:
            try:
                yield task(item)
            except OSError:
                yield task(item)

    texts = search.TestTexts([plan], str(tmp_path / "index"), again)
    numbers = texts.add(QUERIES)
    texts.search()
    assert len(calls) > 1
    assert (texts.matches[numbers] == 3).sum() == len(changed_by_a_word())


def test_another_evaluation_keeps_the_rows_of_other_tasks(scored, tmp_path):
    plan = plan_of(tmp_path, planted([QUERIES[n] for n in SEEN]))
    place = tmp_path / "results"
    place.mkdir()
    for number, name in enumerate(("search", "classes", "search")):
        tasks = [task for task in scored.tasks if task.name == name]
        one = replace(scored, tasks=tasks, local=place, results=str(place))
        found_in(one, plan, tmp_path / str(number))
    with (place / "clean_scores.csv").open() as lines:
        assert [row["task"] for row in csv.DictReader(lines)] == ["classes", "search"]
    with (place / "seen_texts.csv").open() as lines:
        assert {row["task"] for row in csv.DictReader(lines)} == {"classes", "search"}
