"""The catalogue of AIR-Bench, its names on the hub, and what mteb's models are told."""

import pickle
from collections import Counter

import pytest
from mteb.languages import check_language_code

from rayembed import errors
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.named_benchmarks import job_benchmark, job_benchmark_names
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.evaluation.plan import task_factories
from rayembed.pipeline.run.training_job import training_job
from rayembed_extras.air_bench.catalogue import VERSIONS, AirBenchDataset, air_bench_datasets
from rayembed_extras.air_bench.job import air_bench_jobs
from rayembed_extras.air_bench.task import MAIN_SCORES, query_instruction, task_metadata

OLD, NEW = VERSIONS


def one(version: str, **wanted: str) -> AirBenchDataset:
    (found,) = air_bench_datasets(version, **{name: [value] for name, value in wanted.items()})
    return found


def test_numbers_of_data_sets_are_those_that_are_published():
    old, new = air_bench_datasets(OLD), air_bench_datasets(NEW)
    assert (len(old), len(new)) == (28, 69)
    assert Counter(dataset.task for dataset in old) == {"qa": 13, "long-doc": 15}
    assert {split for dataset in old for split in dataset.splits} == {"test"}
    assert {dataset.language for dataset in old} == {"en", "zh"}
    assert len({dataset.language for dataset in new}) == 13
    splits = Counter((dataset.task, split) for dataset in new for split in dataset.splits)
    assert splits == {
        ("qa", "dev"): 54, ("qa", "test"): 53, ("long-doc", "dev"): 4, ("long-doc", "test"): 11,
    }  # fmt: skip


def test_sizes_are_those_that_are_published():
    arxiv = one(NEW, tasks="qa", domains="arxiv")
    assert (arxiv.num_documents, arxiv.num_queries) == (222877, {"dev": 346, "test": 1385})
    marco = one(OLD, domains="msmarco")
    assert (marco.num_documents, marco.num_queries) == (8872840, {"test": 6319})


def test_labels_and_result_files_are_different_for_all():
    for version in VERSIONS:
        datasets = air_bench_datasets(version)
        assert len({dataset.label for dataset in datasets}) == len(datasets)
        paths = [d.result_path(split) for d in datasets for split in d.splits]
        assert len(set(paths)) == len(paths)


def test_names_on_the_hub_follow_the_version():
    """The older version has no split in its names, and hyphens become underscores in both."""
    old = one(OLD, domains="finance", languages="zh")
    assert old.repository == "AIR-Bench/qa_finance_zh"
    assert (old.corpus_split, old.queries_split("test")) == ("corpus_default", "queries_default")
    new = one(NEW, tasks="long-doc", domains="book", splits="dev")
    assert new.repository == "AIR-Bench/long-doc_book_en"
    assert new.labels_repository == "AIR-Bench/qrels-long-doc_book_en-dev"
    name = "a_brief_history_of_time_stephen_hawking"
    assert new.corpus_split == f"corpus_{name}"
    assert new.queries_split("dev") == f"queries_{name}_dev"
    assert new.labels_split("dev") == f"qrels_{name}_dev"
    file = "long-doc/book/en_a-brief-history-of-time_stephen-hawking_dev.json"
    assert new.result_path("dev") == file


def test_choices_narrow_the_catalogue_and_the_splits():
    chosen = air_bench_datasets(NEW, domains=["law", "book"], splits=["dev"])
    assert {dataset.domain for dataset in chosen} == {"law", "book"}
    assert all(dataset.splits == ("dev",) for dataset in chosen)
    assert all(list(dataset.num_queries) == ["dev"] for dataset in chosen)
    assert pickle.loads(pickle.dumps(chosen)) == chosen


@pytest.mark.parametrize(
    ("version", "wanted", "message"),
    [
        ("AIR-Bench_24.06", {}, "did you mean 'AIR-Bench_24.0"),
        (NEW, {"tasks": ["long_doc"]}, "did you mean 'long-doc'"),
        (NEW, {"domains": ["health"]}, "did you mean 'healthcare'"),
        (NEW, {"languages": ["it"]}, "no language 'it'"),
        (OLD, {"splits": ["dev"]}, "AIR-Bench_24.04 has no split 'dev'; allowed: test"),
        (
            NEW,
            {"domains": ["book"], "languages": ["zh"]},
            "no data set that matches all of book, zh",
        ),
        (NEW, {"domains": ["msmarco"], "splits": ["test"]}, "all of msmarco, test"),
    ],
)
def test_unknown_names_and_empty_choices_are_refused(version, wanted, message):
    with pytest.raises(ConfigError, match=message):
        air_bench_datasets(version, **wanted)


def test_every_data_set_has_metadata_that_mteb_takes():
    for version in VERSIONS:
        for dataset in air_bench_datasets(version):
            metadata = task_metadata(dataset, "r1")
            assert metadata.type == "Retrieval"
            assert metadata.main_score == MAIN_SCORES[dataset.task]
            assert metadata.prompt == {"query": query_instruction(dataset)}
            assert metadata.revision == "r1"
            assert metadata.eval_splits == list(dataset.splits)
            (language,) = metadata.eval_langs
            check_language_code(language)


def test_instructions_tell_domains_and_tasks_apart():
    paper = query_instruction(one(NEW, tasks="long-doc", domains="arxiv", splits="dev"))
    abstract = query_instruction(one(NEW, tasks="qa", domains="arxiv"))
    book = query_instruction(one(NEW, domains="book", splits="dev"))
    assert len({paper, abstract, book}) == 3


def test_each_version_of_air_bench_is_a_benchmark_of_its_name() -> None:
    assert set(VERSIONS) <= set(job_benchmark_names())
    assert [job_benchmark(version).name for version in VERSIONS] == list(VERSIONS)
    with pytest.raises(
        ConfigError, match=r"--submission: no benchmark 'AIR-Bench_24\.06' .*; did you"
    ):
        job_benchmark("AIR-Bench_24.06", "--submission")


def test_without_its_extra_it_is_refused_before_work(monkeypatch):
    found = errors.find_spec
    monkeypatch.setattr(
        errors, "find_spec", lambda name: None if name == "pytrec_eval" else found(name)
    )
    with pytest.raises(ConfigError, match=r"AIR-Bench_24\.05 needs pytrec_eval.*\[air-bench\]"):
        air_bench_jobs("AIR-Bench_24.05", "results")


def test_a_training_run_is_told_how_to_be_scored_on_it(capsys):
    argv = ["--dry-run", "--set", "evaluation.benchmarks=[AIR-Bench_24.05]"]
    assert training_job("biencoder")(argv) == 2
    assert "evaluate_model --benchmark AIR-Bench_24.05" in capsys.readouterr().err


def test_a_wrong_name_is_refused_with_the_nearest():
    run = parse(EvaluationRun, {"model": {"reference": "bm25"}, "benchmarks": ["AIR-Bench_24.5"]})
    with pytest.raises(ConfigError, match=r"did you mean 'AIR-Bench_24\.05'\?"):
        task_factories(run)
