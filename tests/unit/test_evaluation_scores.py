"""Scores through mteb: an oracle, chance, resuming, what is refused."""

import math

import mteb
import numpy as np
import pytest
from made_up_articles import COUNT, HELD_OUT, run_over, write_articles
from run_scoring import evaluate, evaluate_reference, tasks_of
from table_model import TableModel, changed, held_out_numbers, number, oracle
from tiny_folders import save_biencoder

from rayembed.config.document import read_yaml
from rayembed.errors import ConfigError, WorkerError
from rayembed.evaluation import rayembed_spec
from rayembed.evaluation.bm25 import Bm25
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.run_scores import run_model
from rayembed.evaluation.score import Store, score
from rayembed.recipes.sample import TASK_NAMES
from rayembed.results.files import read_results


@pytest.fixture
def run(tmp_path):
    return run_over(write_articles(tmp_path / "articles.json"))


class Silent(TableModel):
    """A model that must not be asked."""

    def forward(self, batch, context=None):
        raise AssertionError("embedded although the scores were there")


def random_model():
    return TableModel(np.random.default_rng(0).normal(size=(2 * COUNT, 64)))


def test_an_oracle_scores_one_on_every_task(run, tmp_path):
    scores = evaluate(oracle(), run, name="oracle", revision="1", results_folder=tmp_path)
    assert tuple(scores) == TASK_NAMES
    for task, value in scores.items():
        assert value == pytest.approx(1.0, abs=1e-4), task


def test_a_model_that_knows_nothing_scores_as_chance(run, tmp_path, monkeypatch):
    """Every text gets its own vector, so that nothing ties a query to its document."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        rayembed_spec, "encode", lambda model, texts, **_: rng.normal(size=(len(texts), 64))
    )
    scores = evaluate(random_model(), run, name="random", revision="1", results_folder=tmp_path)
    chance = sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / 100
    # 100 queries: the standard error of the mean nDCG@10 is about 0.016
    assert scores["WikiSentenceRetrieval"] == pytest.approx(chance, abs=0.05)
    assert scores["WikiDescriptionRetrieval"] == pytest.approx(chance, abs=0.05)
    assert scores["WikiTopicClassification"] == pytest.approx(0.25, abs=0.12)
    assert scores["WikiTopicClustering"] < 0.15
    assert scores["WikiTitleDescriptionPairClassification"] == pytest.approx(0.5, abs=0.15)
    assert abs(scores["WikiRelatednessSTS"]) < 0.2


def test_only_held_out_articles_are_seen(run, tmp_path):
    kept = held_out_numbers(run)
    assert len(kept) == HELD_OUT
    model = oracle()
    evaluate(model, run, name="m", revision="1", results_folder=tmp_path)
    seen = {number(text) for text, _, _ in model.tokenizer.seen}
    assert seen <= kept
    assert len(seen) >= 100


def test_roles_and_instructions_are_those_of_training(run, tmp_path):
    told = changed(
        run, instructions={"WikiSentenceRetrieval": "find it", "WikiTopicClustering": "group it"}
    )
    model = oracle()
    evaluate(model, told, name="m", revision="1", results_folder=tmp_path)
    seen = model.tokenizer.seen
    assert len(set(seen)) == len(seen), "a text was embedded twice"
    assert {i for _, role, i in seen if role == "document"} == {""}
    tasks = {task.metadata.name: task for task in tasks_of(told)}
    for task in tasks.values():
        task.load_data()
    data = tasks["WikiSentenceRetrieval"].dataset["default"]["test"]
    asked = {t for t, r, i in seen if (r, i) == ("query", "find it ")}
    assert asked == set(data["queries"]["text"])
    assert set(data["corpus"]["text"]) <= {t for t, r, _ in seen if r == "document"}
    clusters = set(tasks["WikiTopicClustering"].dataset["test"]["text"])
    assert {t for t, r, i in seen if (r, i) == ("query", "group it ")} == clusters


def test_results_are_read_back_by_mteb_and_nothing_is_embedded_again(run, tmp_path):
    first = evaluate(oracle(), run, name="org/m", revision="abc", results_folder=tmp_path)
    again = evaluate(
        Silent(np.ones((COUNT, 4))), run, name="org/m", revision="abc", results_folder=tmp_path
    )
    assert again == first
    (folder,) = (tmp_path / "results" / "org__m").iterdir()
    assert folder.name.startswith("abc-")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    of_mteb = {f"{n}.json" for n in TASK_NAMES} | {"model_meta.json", "run_settings.jsonl"}
    assert names == of_mteb | {"costs.yaml", "prompts.yaml", "versions.yaml"}
    for name in TASK_NAMES:
        assert mteb.TaskResult.from_disk(folder / f"{name}.json").get_score() == first[name]
    meta = model_meta("org/m", folder.name)
    stored = mteb.ResultCache(tmp_path).load_task_result("WikiSentenceRetrieval", meta)
    assert stored.get_score() == first["WikiSentenceRetrieval"]


def test_how_earlier_tasks_were_asked_stays_beside_their_results(run, tmp_path):
    folder = save_biencoder(tmp_path / "model", seed=1)
    spec = run_model(run, str(folder), name="m")
    store = Store(str(tmp_path / "out"), str(tmp_path / "vectors"))
    first, second = task_factories(run.scores)[:2]
    for factories in ([first], [second], [first]):
        (place,) = {score(spec, factories, run_here, store).local}
        before = place / "prompts.yaml"
    found = {s.task: s.measured_with for s in read_results(place, lambda name: None)}
    assert found.keys() == {first.name, second.name}
    assert all({"dtype", "software", "prompt of query"} <= how.keys() for how in found.values())
    # Rows of scores that were taken otherwise are not taken over.
    before.write_text(before.read_text().replace("dtype: float32", "dtype: bfloat16"))
    score(spec, [first], run_here, store)
    assert {row["task"] for row in read_yaml(before.read_text())["prompts"]} == {first.name}


def test_other_weights_data_or_instructions_share_no_results(run, tmp_path):
    evaluate(oracle(), run, name="m", revision="abc", results_folder=tmp_path)
    others = [
        ("xyz", run),
        ("abc", changed(run, documents=90, queries=90)),
        ("abc", changed(run, max_length=20)),
        ("abc", changed(run, instructions={"WikiTopicClustering": "group"})),
        ("abc", changed(run, seed=1)),
    ]
    for revision, other in others:
        with pytest.raises(WorkerError, match="embedded although"):
            evaluate(
                Silent(np.ones((COUNT, 4))),
                other,
                name="m",
                revision=revision,
                results_folder=tmp_path,
            )


def test_a_half_written_or_missing_result_is_made_again(run, tmp_path):
    first = evaluate(oracle(), run, name="m", revision="abc", results_folder=tmp_path)
    (folder,) = (tmp_path / "results" / "rayembed__m").iterdir()
    broken = folder / "WikiSentenceRetrieval.json"
    broken.write_text(broken.read_text()[:200])
    (folder / "WikiTopicClustering.json").unlink()
    model = oracle()
    assert evaluate(model, run, name="m", revision="abc", results_folder=tmp_path) == first
    assert mteb.TaskResult.from_disk(broken).get_score() == first["WikiSentenceRetrieval"]
    asked = {text for text, role, _ in model.tokenizer.seen if role == "document"}
    assert len(asked) == 100


def test_bm25_is_scored_on_retrieval_only(run, tmp_path):
    scores = evaluate(Bm25(), run, name="bm25", revision=Bm25.revision, results_folder=tmp_path)
    # every text carries a word that only its own article has
    assert scores == {"WikiSentenceRetrieval": 1.0, "WikiDescriptionRetrieval": 1.0}
    assert evaluate_reference("bm25", run, name="bm25", results_folder=tmp_path) == scores


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"documents": 500}, r"documents 500 exceeds held_out 120"),
        ({"tasks": ("SciFac",)}, r"did you mean 'SciFact'"),
    ],
)
def test_settings_that_contradict_are_refused(run, settings, message):
    with pytest.raises(ConfigError, match=message):
        tasks_of(changed(run, **settings))


def test_an_unknown_benchmark_is_refused(run):
    with pytest.raises(ConfigError, match="'wikipedi'"):
        tasks_of(changed(run, benchmarks=("wikipedi",)))


def test_without_tasks_nothing_is_scored(run, tmp_path):
    quiet = changed(run, own_sets=())
    model = Silent(np.ones((COUNT, 4)))
    assert evaluate(model, quiet, name="m", revision="1", results_folder=tmp_path) == {}
