"""Jobs against made-up repositories in AIR-Bench's layout, served from loopback."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest
from air_bench_hub import (
    NUM_DOCUMENTS,
    NUM_QUERIES,
    NumberModel,
    air_bench_repositories,
    card,
    jsonl,
    made_up_documents,
    made_up_labels,
    made_up_queries,
)
from dataset_hub import dataset_hub
from mteb.models import SearchEncoderWrapper
from mteb.models.models_protocols import SearchProtocol
from mteb.similarity_functions import cos_sim
from waits import note_waits

from rayembed.errors import ArtifactError, AssetError, ConfigError, DataError
from rayembed.evaluation.model_spec import model_meta
from rayembed_extras.air_bench.catalogue import AirBenchDataset, air_bench_datasets
from rayembed_extras.air_bench.hub_data import load_data
from rayembed_extras.air_bench.job import AIR_BENCH_RESULT, AirBenchJob, air_bench_jobs
from rayembed_extras.air_bench.results import open_results

NEW = "AIR-Bench_24.05"
OLD = "AIR-Bench_24.04"
(ARXIV,) = air_bench_datasets(NEW, tasks=["qa"], domains=["arxiv"])
BOOKS = air_bench_datasets(NEW, domains=["book"])
(OLD_LAW,) = air_bench_datasets(OLD, tasks=["qa"], domains=["law"])


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with some data sets; what `datasets` reads from the environment once points to it."""
    with dataset_hub(air_bench_repositories([ARXIV, *BOOKS, OLD_LAW])) as running:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", running.address)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield running


@pytest.fixture
def waits(monkeypatch):
    """Seconds that would have been slept."""
    return note_waits(
        monkeypatch,
        "rayembed.assets.hub_client",
        "huggingface_hub.utils._http",
        "datasets.utils.file_utils",
    )


def job_of(dataset: AirBenchDataset, folder: Path) -> AirBenchJob:
    return AirBenchJob(dataset, str(folder / "results"), cache=str(folder / "cache"))


def result_file(job: AirBenchJob, split: str, retriever: str = "made__up") -> Path:
    place = Path(job.folder, job.dataset.version, retriever, "NoReranker")
    return place / job.dataset.result_path(split)


def ndcg_at_10(ranked: list[str], relevant: set[str]) -> float:
    gains = [1 / math.log2(rank + 2) for rank in range(10)]
    found = sum(gain for gain, name in zip(gains, ranked, strict=False) if name in relevant)
    return found / sum(gains[: len(relevant)])


def test_a_result_file_is_the_one_of_air_bench(hub, tmp_path):
    job = pickle.loads(pickle.dumps(job_of(ARXIV, tmp_path)))
    model = NumberModel()
    assert isinstance(model, SearchProtocol)
    outcome = job.run(model)[AIR_BENCH_RESULT]
    for split in ("dev", "test"):
        found = json.loads(result_file(job, split).read_text())
        results = found.pop("search_results")
        assert found == {
            "model_name": "made__up",
            "reranker_name": "NoReranker",
            "benchmark_version": "AIR-Bench_24.05",
            "task_type": "qa",
            "domain": "arxiv",
            "language": "en",
            "dataset_name": "default",
            "split": split,
        }
        assert list(results) == list(made_up_queries(ARXIV, split))
        first = {"dev": 0, "test": 10}[split]
        for n in range(NUM_QUERIES):
            hits = results[f"q-{n}"]
            assert next(iter(hits)) == f"doc-{first + n}"
            assert hits[f"doc-{first + n + 3}"] == -3.0
            assert len(hits) == NUM_DOCUMENTS
            assert list(hits.values()) == sorted(hits.values(), reverse=True)
    assert outcome["retriever"] == "made__up"
    assert outcome["scores"]["test"] == {}
    json.dumps(outcome)


def test_the_dev_split_is_scored(hub, tmp_path):
    outcome = job_of(ARXIV, tmp_path).run(NumberModel())[AIR_BENCH_RESULT]
    expected = []
    for n in range(NUM_QUERIES):
        names = made_up_documents(ARXIV)
        # trec_eval puts the greater id first where documents tie.
        ranked = sorted(names, reverse=True)
        ranked.sort(key=lambda name, n=n: abs(int(name.split("-")[1]) - n))
        relevant = {name for name, grade in made_up_labels()[f"q-{n}"].items() if grade}
        expected.append(ndcg_at_10(ranked, relevant))
    scores = outcome["scores"]["dev"]
    assert scores["ndcg_at_10"] == pytest.approx(sum(expected) / NUM_QUERIES, abs=1e-9)
    assert 0.5 < scores["ndcg_at_10"] < 1
    assert scores["recall_at_10"] == 1.0


def test_the_model_sees_the_corpus_once_and_memory_mapped(hub, tmp_path):
    model = NumberModel()
    job_of(ARXIV, tmp_path).run(model)
    (call,) = model.calls
    corpus = call["corpus"]
    assert isinstance(corpus, datasets.Dataset)
    assert corpus.column_names == ["id", "text"]
    assert corpus.cache_files, "its rows are in a file"
    assert type(corpus.data).__name__ == "MemoryMappedTable"
    assert dict(zip(corpus["id"], corpus["text"], strict=True)) == made_up_documents(ARXIV)
    assert len(call["queries"]["id"]) == 2 * NUM_QUERIES, "both splits in one search"
    assert call["top_k"] == 1000
    assert call["task"].prompt["query"].startswith("Given a scientific question")
    assert call["task"].revision == hub.commit(ARXIV.repository)


def test_a_model_of_mteb_searches(hub, tmp_path):
    """Mteb's own search over an encoder: vectors with a one at the text's number."""

    class Encoder:
        mteb_model_meta = model_meta("made/encoder", "r1")

        def encode(self, inputs, **_options):
            texts = [text for batch in inputs for text in batch["text"]]
            return np.eye(NUM_DOCUMENTS, dtype=np.float32)[[int(t.split()[-1]) for t in texts]]

        def similarity(self, one, two):
            return cos_sim(one, two)

        similarity_pairwise = similarity

    job = job_of(ARXIV, tmp_path)
    job.run(SearchEncoderWrapper(Encoder()))
    found = json.loads(result_file(job, "test", "made__encoder").read_text())["search_results"]
    assert [next(iter(hits)) for hits in found.values()] == [f"doc-{10 + n}" for n in range(4)]


def test_the_older_version_names_no_splits(hub, tmp_path):
    job = job_of(OLD_LAW, tmp_path)
    job.run(NumberModel())
    assert result_file(job, "test").name == "en_default_test.json"
    assert job.num_texts == 141678 + 1801
    assert job.name == "AIR-Bench_24.04_qa_law_en_default"


def test_no_more_than_a_thousand_documents_are_kept(hub, tmp_path):
    class Talkative(NumberModel):
        def search(self, queries, **options):
            found = super().search(queries, **options)
            padding = {f"doc-{n}": float(-100 - n) for n in range(NUM_DOCUMENTS, 1500)}
            return {query: hits | padding for query, hits in found.items()}

    many = "".join(json.dumps({"id": f"doc-{n}", "text": f"is {n}"}) + "\n" for n in range(1500))
    hub.files[ARXIV.repository][f"{NEW}/default/corpus.jsonl"] = many.encode()
    job = job_of(ARXIV, tmp_path)
    job.run(Talkative())
    for hits in json.loads(result_file(job, "test").read_text())["search_results"].values():
        assert len(hits) == 1000
        assert "doc-1499" not in hits


def test_a_finished_result_is_not_made_again(hub, tmp_path):
    job = job_of(ARXIV, tmp_path)
    first = NumberModel()
    assert not job.finished(first.mteb_model_meta)
    outcome = job.run(first)
    assert job.finished(first.mteb_model_meta)
    hub.asked.clear()
    second = NumberModel()
    assert job.run(second) == outcome
    assert second.calls == []
    assert hub.asked == []


@pytest.mark.parametrize("harm", ["no file", "no record", "half a file", "half a record"])
def test_only_what_is_missing_is_made_again(harm, hub, tmp_path):
    job = job_of(ARXIV, tmp_path)
    job.run(NumberModel())
    whole = result_file(job, "test").read_bytes()
    record = Path(job.folder, NEW, "made__up", "qa_arxiv_en_default_test.json")
    harmed = record if "record" in harm else result_file(job, "test")
    if harm.startswith("half"):
        harmed.write_bytes(harmed.read_bytes()[: harmed.stat().st_size // 2])
    else:
        harmed.unlink()
    model = NumberModel()
    assert not job.finished(model.mteb_model_meta)
    job.run(model)
    (call,) = model.calls
    assert call["queries"]["id"] == [f"test/q-{n}" for n in range(NUM_QUERIES)]
    assert result_file(job, "test").read_bytes() == whole


def test_another_instruction_makes_a_result_again(hub, tmp_path, monkeypatch):
    job = job_of(ARXIV, tmp_path)
    job.run(NumberModel())
    monkeypatch.setattr("rayembed_extras.air_bench.job.query_instruction", lambda _: "Find it")
    model = NumberModel()
    job.run(model)
    assert len(model.calls) == 1


def test_results_of_another_revision_are_refused(hub, tmp_path):
    job = job_of(ARXIV, tmp_path)
    job.run(NumberModel())
    model = NumberModel("made/up", "r2")
    with pytest.raises(ArtifactError, match=r"'made/up' at revision 'r1'.*another folder"):
        job.run(model)
    # Also of a data set that has no results yet.
    with pytest.raises(ArtifactError, match="made/up"):
        job_of(BOOKS[0], tmp_path).run(model)
    assert model.calls == []
    AirBenchJob(ARXIV, f"{job.folder}-2", job.cache).run(model)  # in another folder it goes


def test_results_that_others_made_are_not_written_over(hub, tmp_path):
    job = job_of(ARXIV, tmp_path)
    foreign = result_file(job, "test")
    foreign.parent.mkdir(parents=True)
    foreign.write_text("{}")
    with pytest.raises(ArtifactError, match=r"made__up' has results, but no made_by\.json"):
        job.run(NumberModel())
    assert foreign.read_text() == "{}"


def test_air_bench_tools_find_nothing_but_results(hub, tmp_path):
    """They list folders: retriever, reranker, task, domain; every file there must be a result."""
    for dataset in (ARXIV, *BOOKS):
        job_of(dataset, tmp_path).run(NumberModel())
    seen = set()
    for retriever in Path(tmp_path, "results", NEW).iterdir():
        for reranker in (path for path in retriever.iterdir() if path.is_dir()):
            for file in (
                p for task in reranker.iterdir() for d in task.iterdir() for p in d.iterdir()
            ):
                found = json.loads(file.read_text())
                assert found["benchmark_version"] == NEW
                seen.add((found["task_type"], found["dataset_name"], found["split"]))
    assert seen == {(d.task, d.name, split) for d in (ARXIV, *BOOKS) for split in d.splits}


@pytest.mark.parametrize("state", ["missing", "gated"])
def test_a_data_set_that_cannot_be_had_is_named_and_others_go_on(state, hub, tmp_path, waits):
    if state == "missing":
        del hub.files[ARXIV.repository]
    else:
        hub.gated = (ARXIV.repository,)
    failed = []
    model = NumberModel()
    for job in (job_of(ARXIV, tmp_path), job_of(BOOKS[0], tmp_path)):
        try:
            job.run(model)
        except AssetError as error:
            failed.append(str(error))
    (message,) = failed
    assert "AIR-Bench/qa_arxiv_en" in message
    assert "HF_TOKEN" in message
    assert waits == [], "trying again would not help"
    assert len(model.calls) == 1


def test_a_missing_repository_of_labels_is_named(hub, tmp_path, waits):
    del hub.files[ARXIV.labels_repository]
    model = NumberModel()
    with pytest.raises(AssetError, match="AIR-Bench/qrels-qa_arxiv_en-dev"):
        job_of(ARXIV, tmp_path).run(model)
    assert model.calls == [], "known before the corpus is embedded"


def test_labels_of_unknown_queries_are_told_before_the_search(hub, tmp_path):
    rows = [{"qid": "q-77", "docid": "doc-1", "relevance": 1}]
    changed(hub, f"{NEW}/default/dev_qrels.jsonl", jsonl(rows), ARXIV.labels_repository)
    model = NumberModel()
    with pytest.raises(DataError, match=r"are for 1 queries .* such as \['q-77'\]"):
        job_of(ARXIV, tmp_path).run(model)
    assert model.calls == []


@pytest.mark.parametrize(
    "refusal", [(429, {"RateLimit": '"api";r=0;t=120'}), (503, {}), (429, {"Retry_After": "7"})]
)
def test_an_overloaded_hub_is_asked_again(refusal, hub, tmp_path, waits):
    hub.refuse, hub.refusal = 2, refusal
    data = load_data(ARXIV, str(tmp_path / "cache"))
    assert len(data.corpus) == NUM_DOCUMENTS
    assert hub.refuse == 0
    asked_for = {"RateLimit": 120.0, "Retry_After": 7.0}
    least = max((asked_for[name] for name in refusal[1]), default=2.0)
    assert max(waits) >= least


def test_a_hub_that_stays_overloaded_is_given_up(hub, tmp_path, waits):
    hub.refuse = 10**6
    with pytest.raises(AssetError, match=r"hf://datasets/AIR-Bench/qa_arxiv_en"):
        load_data(ARXIV, str(tmp_path / "cache"))
    assert 3 < len(waits) < 100


def changed(hub: Any, path: str, content: bytes, repository: str = ARXIV.repository) -> None:
    hub.files[repository][path] = content


def test_a_layout_that_has_changed_is_named(hub, tmp_path):
    cache = str(tmp_path / "cache")
    files = [{"split": "documents", "path": f"{NEW}/default/corpus.jsonl"}]
    changed(hub, "README.md", card({NEW: files}))
    with pytest.raises(
        DataError, match=r"qa_arxiv_en .*no split 'corpus_default'; it has documents"
    ):
        load_data(ARXIV, cache)
    changed(hub, "README.md", card({"AIR-Bench_25.01": files}))
    with pytest.raises(DataError, match=r"qa_arxiv_en has no configuration 'AIR-Bench_24.05'"):
        load_data(ARXIV, cache)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], "2 rows have only 1 distinct ids"),
        ([{"id": "a", "text": "x"}, {"id": "b", "text": None}], "1 rows have no 'text'"),
        ([{"name": "a", "text": "x"}], "no column id; it has name, text"),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_refused(rows, message, hub, tmp_path):
    path = f"{NEW}/default/corpus.jsonl"
    changed(hub, path, jsonl(rows))
    # The card alone decides what is loaded: only the corpus, so that columns may differ.
    files = [{"split": "corpus_default", "path": path}]
    changed(hub, "README.md", card({NEW: files}))
    with pytest.raises(DataError, match=message):
        load_data(ARXIV, str(tmp_path / "cache"))


def test_files_that_do_not_fit_together_are_named(hub, tmp_path):
    changed(hub, f"{NEW}/default/corpus.jsonl", jsonl([{"id": 1, "text": "says 1"}]))
    with pytest.raises(
        DataError, match=r"qa_arxiv_en \(AIR-Bench_24.05\) cannot be read: .*string"
    ):
        load_data(ARXIV, str(tmp_path / "cache"))


def test_ids_that_are_numbers_are_read_as_texts(hub, tmp_path):
    rows = [{"id": n, "text": f"says {n}"} for n in range(5)]
    for name in ("corpus", "dev_queries", "test_queries"):
        changed(hub, f"{NEW}/default/{name}.jsonl", jsonl(rows))
    data = load_data(ARXIV, str(tmp_path / "cache"))
    assert list(data.corpus["id"]) == ["0", "1", "2", "3", "4"]
    assert list(data.queries["dev"]["id"]) == ["0", "1", "2", "3", "4"]


def test_without_the_hub_the_cache_is_taken(hub, tmp_path, waits, monkeypatch):
    cache = str(tmp_path / "cache")
    online = load_data(ARXIV, cache)
    assert online.revision == hub.commit(ARXIV.repository)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers
    offline = load_data(ARXIV, cache)
    assert offline.revision == ""
    assert offline.corpus.to_dict() == online.corpus.to_dict()
    with pytest.raises(AssetError, match="AIR-Bench/qa_law_en"):
        load_data(OLD_LAW, cache)


def without_a_query(found):
    return {query: hits for query, hits in found.items() if query != "test/q-2"}


def with_another_query(found):
    return found | {"q-99": {"doc-1": 1.0}}


def with_an_unknown_document(found):
    return {query: hits | {"doc-99": 0.5} for query, hits in found.items()}


def with_nan(found):
    return found | {"dev/q-1": {"doc-1": math.nan}}


def with_an_empty_query(found):
    return found | {"dev/q-1": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_query, r"returned no documents for 1 of 8 queries: \['test/q-2'\]"),
        (with_an_empty_query, r"returned no documents for 1 of 8 queries: \['dev/q-1'\]"),
        (with_another_query, r"queries that are not in the data set: \['q-99'\]"),
        (with_an_unknown_document, r"documents that are not in the corpus.*doc-99"),
        (with_nan, "a score of query 'dev/q-1' is not a finite number"),
    ],
)
def test_answers_that_the_leaderboard_would_not_take_are_refused(change, message, hub, tmp_path):
    class Wrong(NumberModel):
        def search(self, queries, **options):
            return change(super().search(queries, **options))

    job = job_of(ARXIV, tmp_path)
    with pytest.raises(ArtifactError, match=message):
        job.run(Wrong())
    assert not result_file(job, "test").exists()
    assert not result_file(job, "dev").exists()


@pytest.mark.parametrize("name", ["a b", "<b>", "/", "../..", "é", "x" * 129])
def test_names_that_break_folders_or_the_leaderboard_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="retriever's name"):
        open_results(str(tmp_path), NEW, model_meta(name, "r1"))
    assert list(tmp_path.iterdir()) == []


def test_jobs_for_all_data_sets_that_are_wanted():
    assert len(air_bench_jobs(OLD, "out")) == 28
    names = {job.name for job in air_bench_jobs(NEW, "out", ["en"])}
    assert "AIR-Bench_24.05_long-doc_law_en_lex_files_300K-400K" in names
    assert all("_en_" in name for name in names)
