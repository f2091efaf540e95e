"""Texts that the length limit cuts: counted as an independent tokenizer counts them."""

import json
from pathlib import Path

import numpy as np
import pytest
from beir_set import write_beir
from scored_sets import own_task, save_word_model, scored
from tiny_folders import TINY, save_tiny
from tiny_models import LINES

from rayembed.config.evaluation import ModelUnderTest
from rayembed.data.engine.parts import write_part
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.run_scores import make_spec
from rayembed.models.loading.load import load_model, tokenizer_of
from rayembed.pipeline.evaluate.findings import ScoredModels
from rayembed_extras.query_changes.cut_texts import FILE, TextCount, cut_texts, read_cuts
from rayembed_extras.query_changes.lengths import lengths_of, tokens_in
from rayembed_extras.query_changes.training_rows import rows_with_negatives, trained_texts

LIMIT = TINY["biencoder"].settings["document_max_length"]


def words(count):
    return " ".join(["ship"] * count)


DOCUMENTS = {f"d{n}": words(5) for n in range(15)} | {f"long{n}": words(60) for n in range(5)}
QUERIES = {f"q{n}": words(3) for n in range(9)} | {"q-long": words(50)}
JUDGED = {f"q{n}": {f"d{n}": 1} for n in range(8)} | {"q8": {"long0": 1}, "q-long": {"d9": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cut")


@pytest.fixture(scope="module")
def model(folder):
    return save_word_model(folder / "model")


@pytest.fixture(scope="module")
def subject(folder, model):
    task = own_task(write_beir(folder / "set", DOCUMENTS, QUERIES, JUDGED))
    # Of the whole queries half find their document, of the two cut ones only one.
    rankings = {
        q: ["d14", *(found if n % 2 else [])] for n, (q, found) in enumerate(JUDGED.items())
    }
    rankings["q8"] = ["long0"]
    judged = scored(folder, "tiny", task, rankings, model)
    return ScoredModels({"tiny": judged}, "tiny", None, str(model), str(folder))


def test_shares_scores_and_files_of_a_planted_set(subject):
    finding = cut_texts(subject)
    (row,) = finding.table.rows
    assert row[:4] == ["planted", str(LIMIT), "10.0 %", "25.0 %"]
    scores = subject.judged.items["planted"][0]
    by_query = dict(zip(sorted(QUERIES), scores, strict=True))
    cut = [by_query[q] for q in ("q8", "q-long")]
    whole = [score for q, score in by_query.items() if q not in ("q8", "q-long")]
    assert row[4:] == [f"{np.mean(cut):.3f} (2)", f"{np.mean(whole):.3f} (8)"]
    assert finding.metrics == {
        "cut_queries": {"planted": 0.1},
        "cut_documents": {"planted": 0.25},
    }
    kept = read_cuts(finding.files[FILE])["planted"]["test", "default"]
    assert set(kept.queries) == {"q-long"}
    assert set(kept.documents) == {"long0"}, "of documents those that are relevant"
    assert (kept.query_limit, kept.document_limit) == (LIMIT, LIMIT)


def test_warnings_name_the_setting_and_a_length_that_fits(subject, model):
    queries, documents = cut_texts(subject).lines
    longest = len(tokenizer_of(model).pretrained(f"the world {words(60)}")["input_ids"])
    fitting = -(-longest // 8) * 8
    assert documents.startswith(
        "25.0 % of the documents of planted (5 of 20) are longer than the 20 "
    )
    assert f"99 % are within {fitting}" in documents
    assert f"train it with model.document_max_length={fitting}" in documents
    assert "model.query_max_length=" in queries


def test_a_model_that_an_evaluation_shortens_is_to_be_read_longer(folder, subject, model):
    spec = make_spec(ModelUnderTest(reference=str(model), max_length=12))
    judged = subject.judged
    shortened = type(judged)(**{**vars(judged), "model": spec})
    given = ScoredModels({"tiny": shortened}, "tiny", None, str(model), str(folder))
    assert "longer than the 12 tokens that are read" in cut_texts(given).lines[0]
    assert "set model.max_length=" in cut_texts(given).lines[0]


def test_few_cut_texts_give_no_table_and_models_of_others_no_finding(tmp_path, model):
    documents = {f"d{n}": words(4) for n in range(201)} | {"long": words(60)}
    task = own_task(write_beir(tmp_path / "set", documents, {"q": words(3)}, {"q": {"d0": 1}}))
    judged = scored(tmp_path, "tiny", task, {"q": ["d0"]}, model)
    finding = cut_texts(ScoredModels({"tiny": judged}, "tiny", None, str(model), "s"))
    assert (finding.table, finding.lines) == (None, ())
    assert finding.metrics["cut_documents"] == {"planted": pytest.approx(1 / 202)}
    assert finding.metrics["cut_queries"] == {}, "curves of tasks with cut texts alone"
    judged.tasks[0].results.clear()
    assert cut_texts(ScoredModels({"tiny": judged}, "tiny", None, str(model), "s")).metrics == {
        "cut_queries": {},
        "cut_documents": {},
    }
    judged.model = None
    assert cut_texts(ScoredModels({"tiny": judged}, "tiny", None, str(model), "s")) is None


@pytest.mark.parametrize("kind", TINY)
def test_texts_count_as_cut_where_the_model_reads_fewer_tokens(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / kind)
    spec = make_spec(ModelUnderTest(reference=str(folder), max_length=20))
    lengths = lengths_of(spec)
    tokenizer = load_model(folder).tokenizer
    texts = [" ".join(LINES)[n : 4 * n] for n in range(60)]
    texts += ["", "é" * 25, "1 2 3 4 5 6 7 8 9 10 11", "日本語のテキスト" * 3]
    for role in ("query", "document"):
        read = {}
        for limit in (20, 10_000):
            tokenizer.max_lengths = dict.fromkeys(("query", "document"), limit)
            made = tokenizer(texts, role, [""] * len(texts), allow_empty=True)
            read[limit] = np.array([len(one["input_ids"]) for one in made])
        wanted = read[20] < read[10_000]
        counted = lengths.tokens(texts, role)
        assert ((counted > 20) == wanted).all()
        assert 0 < wanted.sum() < len(texts)
        known = counted > 0
        np.testing.assert_array_equal(counted[known], read[10_000][known])


def test_the_prompt_of_a_task_counts(model):
    lengths = lengths_of(make_spec(ModelUnderTest(reference=str(model))))
    text = words(16)
    assert tokens_in(lengths, [text, "ship"], EncodeSpec("query")).tolist() == [18, 0]
    assert tokens_in(lengths, [text], EncodeSpec("query", words(4) + " ")).tolist() == [22]


def test_counts_of_tokens():
    tokens = np.array([0] * 98 + [30, 500])
    assert TextCount.of(tokens, 20) == TextCount(100, 2, 20, 32)
    assert TextCount.of(np.zeros(5, np.int64), 20) == TextCount(5, 0, 20, 20)
    assert TextCount.of(np.zeros(0, np.int64), 20).share == 0


@pytest.fixture(scope="module")
def plan(folder):
    rows = [
        Record(
            id=f"t/{n}",
            query=f"query {n}",
            positives=(f"answer {n}", "another answer"),
            dataset="t",
            negatives=(Negative(f"wrong {n % 3}"), Negative("never trained")),
            query_instruction="find",
        )
        for n in range(8)
    ]
    config = PlanConfig(
        weights={"t": 1.0},
        global_pairs=4,
        num_negatives=1,
        num_steps=6,
        seed=0,
        in_batch_negatives=True,
        key="s",
    )
    return write_plan(str(folder / "plan"), {"t": [write_part(str(folder / "t"), rows)]}, config)


def test_texts_of_a_plan_are_those_that_its_steps_train(plan):
    (texts,) = trained_texts(plan).values()
    assert {one.text for one in texts if one.role == "query"} == {f"query {n}" for n in range(8)}
    documents = {one.text for one in texts if one.role == "document"}
    assert {f"wrong {n}" for n in range(3)} <= documents
    assert "never trained" not in documents
    assert {one.instruction for one in texts if one.role == "query"} == {"find"}


def test_rows_that_have_a_document_as_a_hard_negative(plan):
    texts = {"a": "Wrong 1 ", "b": "wrong 1", "c": "never trained", "d": "answer 1"}
    found = rows_with_negatives([plan.folder, plan.folder], texts)
    assert {name: sorted(queries) for name, queries in found.items()} == {
        "a": ["query 1", "query 4", "query 7"],
        "b": ["query 1", "query 4", "query 7"],
    }


def test_the_file_of_cut_texts_can_be_read_back():
    content = {"t": {"test/default": {"queries": {"q": 30}, "query_limit": 20}}}
    (cut,) = read_cuts(json.dumps(content))["t"].values()
    assert (cut.queries, cut.documents, cut.query_limit) == ({"q": 30}, {}, 20)


def test_cut_texts_of_tasks_that_were_counted_before_stay(subject):
    now = cut_texts(subject).files[FILE]
    subject.write(FILE, b'{"earlier": {"test/default": {}}, "planted": {"old/old": {}}}')
    try:
        again = json.loads(cut_texts(subject).files[FILE])
    finally:
        (Path(subject.judged.local) / FILE).unlink()
    assert again.pop("earlier") == {"test/default": {}}
    assert again == json.loads(now), "its own task is counted anew"
