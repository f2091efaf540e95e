"""The tasks that weights are validated on: whose texts, which tasks, which score."""

import json

import numpy as np
import pytest
from datasets import Dataset
from made_up_articles import (
    COUNT,
    HELD_OUT,
    run_over,
    sample_over,
    validation_over,
    write_articles,
)
from own_task_data import retrieval_data
from plain_sample import sizes_of
from run_scoring import tasks_of
from table_model import changed
from tiny_models import byte_level_tokenizer, save_cde_stages, save_decoder
from word_articles import run_over_words, write_word_articles

from rayembed.assets.resolver import resolve
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import AssetError, ConfigError, DataError
from rayembed.evaluation.validation import (
    check_validation,
    data_revision,
    deciding_score,
    validate,
    validation_tasks,
)
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import corpus_context, encode

TITLES = 20
LEFT = {"held_out": HELD_OUT - TITLES}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))


def wikipedia_run(tmp_path, **evaluation) -> Run:
    return validated(run_over(write_articles(tmp_path / "articles.json"), **LEFT, **evaluation))


def validated(run: Run) -> Run:
    """The run with validation over the held-out articles that its scores leave."""
    sizes = dict(sizes_of(run.evaluation.own_sets))
    sample = sample_over(sizes.pop("source"))
    sets = validation_over(sample, sizes, held_out=TITLES)
    every = {"sets": [own.model_dump(mode="json") for own in sets], "kind": "own_sets"}
    told = json.dumps({"data": every, "every_steps": 5})
    return override(run, ["stages.one.steps=10", f"evaluation.validation={told}"])


def words(task) -> set[str]:
    """The words of a task's texts that name their article."""
    task.load_data()
    sample = task.dataset["default"]["test"]
    texts = [*sample["corpus"]["text"], *sample["queries"]["text"]]
    return {word.strip(".") for text in texts for word in text.split() if word.startswith("own")}


def test_validation_and_final_scores_share_no_article_and_no_training_row(tmp_path):
    run = wikipedia_run(tmp_path)
    tasks = validation_tasks(run)
    assert [task.metadata.name for task in tasks] == [
        "WikiSentenceRetrieval",
        "WikiDescriptionRetrieval",
    ]
    validated = set().union(*map(words, tasks))
    final = set().union(*(words(task) for task in tasks_of(run)[:2]))
    assert len(validated) == TITLES
    assert len(final) == HELD_OUT - TITLES
    assert not validated & final
    every = changed(run, held_out=HELD_OUT, documents=HELD_OUT)
    assert validated < set().union(*(words(task) for task in tasks_of(every)[:2]))
    rows = resolve(sample_over(tmp_path / "articles.json").pairs("sentence").path).read_text()
    assert not {word for word in rows.split() if word in validated | final}
    assert f"own{COUNT - 1}" in rows, "the words are in the rows"


def judged(folder, *, rows=("q1\td1\t2", "q1\t3\t1", "q2\td2\t1", "q3\td1\t0")):
    """A folder in BEIR's layout; the judgements grade documents of q1 and q2."""
    documents = [
        {"_id": "d1", "title": "Foxes", "text": "eat mice"},
        {"_id": "d2", "title": "", "text": "Owls hunt at night"},
        {"_id": 3, "text": "Paris is a city"},
    ]
    queries = [{"_id": f"q{i}", "text": f"question {i}"} for i in (1, 2, 3)]
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, lines in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "qrels" / "dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]))


def beir_run(tmp_path, **data) -> Run:
    every = {"data": {"kind": "beir", "path": "mine", **data}, "every_steps": 5}
    return override(
        run_over(tmp_path / "articles.json"),
        [
            "stages.one.steps=10",
            "evaluation.own_sets=[]",
            f"data.root={tmp_path}",
            f"evaluation.validation={json.dumps(every)}",
        ],
    )


def test_the_users_own_files_are_a_task(tmp_path):
    judged(tmp_path / "mine")
    (task,) = validation_tasks(beir_run(tmp_path, name="own-dev"))
    assert task.metadata.name == "own-dev"
    assert task.eval_splits == ["dev"]
    judged(tmp_path / "same")
    judged(tmp_path / "other", rows=["q1\td1\t1"])
    revisions = {
        path: data_revision(validation_tasks(beir_run(tmp_path, name="own-dev", path=path)))
        for path in ("same", "other")
    }
    assert revisions["same"] == data_revision([task]) != revisions["other"]


def test_files_that_are_not_in_order_are_refused(tmp_path):
    judged(tmp_path / "mine", rows=["q1\td9\t1"])
    with pytest.raises(DataError, match="d9"):
        check_validation(beir_run(tmp_path))
    with pytest.raises(DataError, match=r"no set at .*/none"):
        check_validation(beir_run(tmp_path, path="none"))


def test_a_corpus_that_is_not_small_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rayembed.evaluation.validation.MAX_SIZE", 2)
    judged(tmp_path / "mine")
    with pytest.raises(DataError, match="has 3 documents, more than 2"):
        check_validation(beir_run(tmp_path))


def test_nano_tasks_alone_may_choose(tmp_path):
    run = beir_run(tmp_path)
    nano = [
        "evaluation.validation.data.kind=mteb",
        "evaluation.validation.data.tasks=[NanoNQRetrieval]",
    ]
    (task,) = validation_tasks(override(run, nano))
    assert task.metadata.name == "NanoNQRetrieval"
    for name in ("SciFact", "NanoNQ", "STSBenchmark"):
        with pytest.raises(ConfigError, match="not a task of NanoBEIR; tasks that compare models"):
            validation_tasks(override(run, [nano[0], f"evaluation.validation.data.tasks=[{name}]"]))


def nano_run(tmp_path, **data) -> Run:
    given = {"kind": "mteb", "tasks": ["NanoNQRetrieval"], **data}
    every = {"data": given, "every_steps": 5}
    return override(beir_run(tmp_path), [f"evaluation.validation={json.dumps(every)}"])


def test_a_nano_task_is_scored_with_its_instruction(tmp_path, monkeypatch):
    """mteb's own class with made-up data; a query that is a document's text finds that document."""
    import mteb

    def load_data(self, num_proc=None, **_options):
        texts = {f"d{i}": f"own{i} text" for i in range(30)}
        corpus = Dataset.from_dict({"id": list(texts), "text": list(texts.values())})
        queries = Dataset.from_dict({"id": ["q4"], "text": ["own4 text"]})
        split = {"corpus": corpus, "queries": queries, "relevant_docs": {"q4": {"d4": 1}}}
        self.dataset = {"default": {"train": {**split, "top_ranked": None}}}
        self.data_loaded = True

    monkeypatch.setattr(type(mteb.get_task("NanoNQRetrieval")), "load_data", load_data)
    model = load_model(save_decoder(tmp_path / "model", tokenizer=byte_level_tokenizer()))
    asked = []

    def seen(model, texts, *, role, instruction, **_):
        asked.append((role, instruction, len(texts)))
        return encode(model, texts, role=role)

    monkeypatch.setattr("rayembed.evaluation.rayembed_spec.encode", seen)
    run = nano_run(tmp_path, instructions={"NanoNQRetrieval": "find"})
    check_validation(run)
    assert validate(model, run) == {"NanoNQRetrieval": pytest.approx(1.0)}
    assert sorted(asked) == [("document", "", 30), ("query", "find ", 1)]


def test_a_nano_task_without_its_hub_is_told_before_training(tmp_path, monkeypatch):
    import mteb

    def load_data(self, num_proc=None, **_options):
        raise ConnectionError("no hub")

    monkeypatch.setattr(type(mteb.get_task("NanoNQRetrieval")), "load_data", load_data)
    with pytest.raises(AssetError, match=r"'NanoNQRetrieval'.* the hub cannot be reached"):
        check_validation(nano_run(tmp_path))


def test_scores_are_those_of_the_vectors(tmp_path):
    """nDCG@10 of the user's files against one computed from vectors and grades here."""
    model = load_model(save_decoder(tmp_path / "model", tokenizer=byte_level_tokenizer()))
    judged(tmp_path / "mine")
    run = beir_run(tmp_path)
    queries = encode(model, ["question 1", "question 2"], role="query")
    texts = ["Foxes eat mice", "Owls hunt at night", "Paris is a city"]
    documents = encode(model, texts, role="document")
    grades = np.array([[2, 0, 1], [0, 1, 0]])
    order = np.argsort(-(queries @ documents.T), axis=1)
    discounts = 1 / np.log2(np.arange(2, 5))
    gained = (np.take_along_axis(grades, order, axis=1) * discounts).sum(axis=1)
    ideal = (-np.sort(-grades, axis=1) * discounts).sum(axis=1)
    expected = float((gained / ideal).mean())
    assert 0.3 < expected < 1
    assert validate(model, run) == {"validation": pytest.approx(expected, abs=1e-5)}


def test_the_deciding_score_is_the_weighted_mean():
    scores = {"a": 0.2, "b": 0.8, "c": 0.5}
    assert deciding_score(scores, {}) == pytest.approx(0.5)
    assert deciding_score(scores, {"a": 3.0}) == pytest.approx((0.6 + 0.8 + 0.5) / 5)


def test_a_contextual_model_is_validated_in_the_context_of_the_corpus(tmp_path, monkeypatch):
    run = validated(run_over_words(write_word_articles(tmp_path / "articles.json"), held_out=100))
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": 4,
        "query_max_length": 62,
        "document_max_length": 62,
    }
    run = run.model_copy(update={"model": parse(CDEConfig, config)})
    model = build_model(run.model, save_cde_stages(tmp_path), seed=5).eval()
    seen = []
    embed = model.embed_context
    monkeypatch.setattr(model, "embed_context", lambda batch: seen.append(1) or embed(batch))
    found = validate(model, run)
    assert len(seen) >= len(found) == 2
    for task in validation_tasks(run):
        data = retrieval_data(task)
        texts = list(data.documents.values())
        model.set_corpus(corpus_context(model, texts, seed=run.seed))
        scores = encode(model, list(data.queries.values()), role="query") @ (
            encode(model, texts, role="document").T
        )
        names = list(data.documents)
        ranks = [
            1 + int((row > row[names.index(next(iter(data.relevant[query])))]).sum())
            for query, row in zip(data.queries, scores, strict=True)
        ]
        expected = np.mean([1 / np.log2(rank + 1) if rank <= 10 else 0.0 for rank in ranks])
        assert found[task.metadata.name] == pytest.approx(expected, abs=1e-4)
