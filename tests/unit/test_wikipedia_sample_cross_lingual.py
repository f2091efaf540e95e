"""Articles in other languages that look for their English counterparts, and cut vectors."""

import json
from pathlib import Path

import mteb
import numpy as np
import pytest
from made_up_articles import COUNT, run_over, wikipedia_over, write_articles
from plain_sample import sizes_of
from run_scoring import evaluate, tasks_of
from table_model import (
    NumberTokenizer,
    TableModel,
    changed,
    held_out_numbers,
    number,
    oracle,
)

from rayembed.errors import ConfigError, DataError
from rayembed.evaluation.bm25 import Bm25
from rayembed.recipes.sample import CROSS_LINGUAL, TASK_NAMES


@pytest.fixture
def run(tmp_path):
    """Scored in French, which has all articles, and in Spanish, which has a fifth of them."""
    source = write_articles(tmp_path / "en-us.json")
    articles = json.loads(source.read_text())
    fifth = {title: articles[title] for title in sorted(articles)[::5]}
    (tmp_path / "fr-fr.json").write_text(json.dumps(articles))
    (tmp_path / "es-es.json").write_text(json.dumps(fifth))
    return run_over(tmp_path / "{language}.json", languages=("fr", "es"), sampled=wikipedia_over)


def read(run, language):
    source = sizes_of(run.evaluation.own_sets).source
    name = {"en": "en-us", "fr": "fr-fr", "es": "es-es"}[language]
    return json.loads(Path(source.replace("{language}", name)).read_text())


def samples(run):
    """Language → documents, queries and judgements of the cross-lingual task."""
    task = tasks_of(run)[-1]
    task.load_data()
    return {code: part["test"] for code, part in task.dataset.items()}


def texts(rows):
    return dict(zip(rows["id"], rows["text"], strict=True))


def test_an_oracle_finds_every_counterpart_and_results_name_the_languages(run, tmp_path):
    scores = evaluate(oracle(), run, name="oracle", revision="1", results_folder=tmp_path)
    assert tuple(scores) == (*TASK_NAMES, CROSS_LINGUAL)
    assert scores[CROSS_LINGUAL] == pytest.approx(1.0, abs=1e-4)
    path = next(tmp_path.glob(f"results/*/*/{CROSS_LINGUAL}.json"))
    found = {
        one["hf_subset"]: one["languages"] for one in mteb.TaskResult.from_disk(path).scores["test"]
    }
    assert found == {
        "fra-Latn": ["fra-Latn", "eng-Latn"],
        "spa-Latn": ["spa-Latn", "eng-Latn"],
    }


class OneOff(NumberTokenizer):
    """Takes each of the given queries for the article after its own."""

    def __init__(self, queries):
        super().__init__()
        self.queries = queries

    def __call__(self, texts, role, instructions=None, *, allow_empty=False):
        tokens = super().__call__(texts, role, instructions, allow_empty=allow_empty)
        for text, token in zip(texts, tokens, strict=True):
            if role == "query" and text in self.queries:
                token["input_ids"] = (token["input_ids"] + 1) % COUNT
        return tokens


def test_the_score_is_the_mean_of_the_languages(run, tmp_path):
    spanish, french = changed(run, languages=("es",)), changed(run, languages=("fr",))
    model = TableModel(np.eye(COUNT))
    model.tokenizer = OneOff(set(list(samples(run)["fra-Latn"]["queries"]["text"])[::2]))
    found = {
        name: evaluate(model, asked, name=name, revision="1", results_folder=tmp_path)[
            CROSS_LINGUAL
        ]
        for name, asked in {"spa": spanish, "fra": french, "both": run}.items()
    }
    assert len(set(found.values())) == 3
    assert found["both"] == pytest.approx((found["spa"] + found["fra"]) / 2, abs=1e-4)


def test_only_held_out_articles_ask_and_answer_and_counterparts_come_first(run):
    held_out = held_out_numbers(run)
    for sample in samples(run).values():
        documents = {key: number(text) for key, text in texts(sample["corpus"]).items()}
        queries = texts(sample["queries"])
        assert set(documents.values()) <= held_out
        assert len(documents) == 100
        for query, relevant in sample["relevant_docs"].items():
            assert [documents[d] for d in relevant] == [number(queries[query])]
    spanish = samples(run)["spa-Latn"]
    expected = {number(title) for title in read(run, "es")} & held_out
    assert {number(text) for text in spanish["queries"]["text"]} == expected


def test_samples_depend_on_content_and_seed_alone(run, tmp_path):
    def revision(run):
        return tasks_of(run)[-1].metadata.dataset["revision"]

    articles = read(run, "es")
    (tmp_path / "moved").mkdir()
    for name, content in (("en-us", read(run, "en")), ("fr-fr", read(run, "fr"))):
        (tmp_path / "moved" / f"{name}.json").write_text(json.dumps(content))
    other = tmp_path / "moved" / "es-es.json"
    other.write_text(json.dumps(dict(reversed(articles.items()))))
    moved = f"{tmp_path}/moved/{{language}}.json"
    assert revision(changed(run, source=moved)) == revision(run)
    assert revision(changed(run, seed=1)) != revision(run)
    plain = changed(run, languages=())
    assert [task.metadata.name for task in tasks_of(plain)] == list(TASK_NAMES)


def test_bm25_is_scored_on_it(run, tmp_path):
    scores = evaluate(Bm25(), run, name="bm25", revision=Bm25.revision, results_folder=tmp_path)
    assert scores[CROSS_LINGUAL] == 1.0, "the made-up languages share their words"


def test_wrong_languages_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"languages.0 = 'french'.*'en', 'fr' or 'es'"):
        changed(run, languages=("french",))
    nobody = {
        "x": {"title": "Nobody", "extract": "own1 a b c d e f.", "description": "", "topic": ""}
    }
    (tmp_path / "fr-fr.json").write_text(json.dumps(nobody))
    with pytest.raises(DataError, match=r"no held-out article yields queries in fra-Latn"):
        tasks_of(changed(run, languages=("fr",)))


def test_cut_vectors_are_scored_by_themselves(run, tmp_path):
    """The first half of the vectors knows nothing, the second all."""
    known = np.eye(COUNT)
    model = TableModel(np.concatenate([np.ones((COUNT, COUNT)), 9 * known], axis=1))
    plain = changed(run, languages=())
    whole = evaluate(model, plain, name="m", revision="w1", results_folder=tmp_path)
    half = evaluate(model, plain, name="m", revision="w1", results_folder=tmp_path, dimension=COUNT)
    assert whole["WikiSentenceRetrieval"] == pytest.approx(1.0, abs=1e-4)
    assert half["WikiSentenceRetrieval"] < 0.3
    revisions = sorted(path.parent.name for path in tmp_path.glob("results/*/*/WikiTopic*ing.json"))
    assert [name.startswith("first") for name in revisions] == [True, False]
    assert revisions[0].startswith(f"first{COUNT}-w1-")
    drawn = np.random.default_rng(0).normal(size=(2, COUNT, COUNT // 2))
    first = TableModel(drawn[0])
    expected = evaluate(first, plain, name="first", revision="w2", results_folder=tmp_path)
    longer = TableModel(np.concatenate([drawn[0], 5 * drawn[1]], axis=1))
    found = evaluate(
        longer, plain, name="long", revision="w3", results_folder=tmp_path, dimension=COUNT // 2
    )
    assert found == pytest.approx(expected, abs=1e-4)
