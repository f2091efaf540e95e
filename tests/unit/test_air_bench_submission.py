"""The submission's zip file and its checks. Results are made up, without hub and model."""

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, s3_server

from rayembed.assets.storage import read_bytes, upload_folder
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.model_spec import model_meta
from rayembed_extras.air_bench.catalogue import air_bench_datasets
from rayembed_extras.air_bench.results import AirBenchResults, open_results
from rayembed_extras.air_bench.submission import write_submission

OLD, NEW = "AIR-Bench_24.04", "AIR-Bench_24.05"
FOUND = {"q-0": {"doc-1": 0.5, "doc-2": 0.25}, "q-1": {"doc-2": 1.0}}


def results_of(folder: Path | str, version: str, found: Any = FOUND) -> AirBenchResults:
    """Results of all splits of a version."""
    results = open_results(str(folder), version, model_meta("made/up", "r1"))
    for dataset in air_bench_datasets(version):
        for split in dataset.splits:
            results.save(
                dataset, split, found,
                instruction="", dataset_revision="c1", num_documents=2, scores={},
            )  # fmt: skip
    return results


@pytest.fixture
def results(tmp_path):
    return results_of(tmp_path / "results", OLD)


def submit(tmp_path: Path, version: str = OLD, retriever: str = "made__up") -> Path:
    folder, out = str(tmp_path / "results"), str(tmp_path / "out")
    return Path(write_submission(folder, version, retriever, out))


def refusal(tmp_path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        submit(tmp_path)
    assert not (tmp_path / "out").exists(), "no zip file, not even a part of one"
    return str(caught.value)


def record_path(results: AirBenchResults, label: str) -> Path:
    return Path(results.folder, results.version, results.retriever, f"{label}_test.json")


def forge(results: AirBenchResults, change: Any) -> None:
    """Change the result file of arXiv questions and let its record vouch for it."""
    (dataset,) = air_bench_datasets(results.version, tasks=["qa"], domains=["arxiv"])
    path = Path(results.path(dataset, "test"))
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    record = record_path(results, dataset.label)
    about = json.loads(record.read_text())
    about["result_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    record.write_text(json.dumps(about))


def test_the_zip_file_has_the_test_results_alone(tmp_path):
    results_of(tmp_path / "results", NEW)
    path = submit(tmp_path, NEW)
    assert path == tmp_path / "out" / "made__up_NoReranker.zip"
    with zipfile.ZipFile(path) as packed:
        assert packed.testzip() is None
        names = packed.namelist()
        arxiv = json.loads(packed.read("qa/arxiv/en_default_test.json"))
    assert len(names) == len(set(names)) == 64
    assert not [name for name in names if name.endswith("dev.json")]
    assert {name.split("/")[0] for name in names} == {"qa", "long-doc"}
    assert "long-doc/law/en_lex_files_400K-500K_test.json" in names
    assert not [name for name in names if "msmarco" in name], "it has only a dev split"
    assert arxiv["search_results"] == FOUND
    assert sorted(path.parent.iterdir()) == [path], "nothing half written stays"


def test_equal_results_give_equal_bytes(results, tmp_path):
    first = submit(tmp_path).read_bytes()
    assert submit(tmp_path).read_bytes() == first


def test_missing_results_are_listed_with_what_to_run(results, tmp_path):
    law, news = air_bench_datasets(OLD, tasks=["qa"], domains=["law", "news"], languages=["en"])
    Path(results.path(law, "test")).unlink()
    record_path(results, news.label).unlink()
    message = refusal(tmp_path)
    assert "2 of its test results are missing or wrong" in message
    assert "qa/law/en_default_test.json: missing" in message
    assert "qa/news/en_default_test.json: missing" in message
    assert "Evaluate" not in message.splitlines()[0]
    assert "evaluate 'made/up' (revision 'r1') on 'AIR-Bench_24.04' again" in message


def test_a_long_list_is_cut(tmp_path):
    open_results(str(tmp_path / "results"), OLD, model_meta("made/up", "r1"))
    message = refusal(tmp_path)
    assert "28 of its test results" in message
    assert "and 8 more" in message


def test_a_changed_result_is_refused(results, tmp_path):
    (dataset,) = air_bench_datasets(OLD, domains=["msmarco"])
    path = Path(results.path(dataset, "test"))
    path.write_text(path.read_text().replace("0.5", "0.9"))
    assert "qa/msmarco/en_default_test.json: not what the evaluation wrote" in refusal(tmp_path)


def test_a_result_of_another_revision_is_refused(results, tmp_path):
    record = record_path(results, "qa_arxiv_en_default")
    record.write_text(record.read_text().replace('"r1"', '"r0"'))
    assert "made with revision 'r0', not 'r1'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(benchmark_version=NEW), "benchmark_version is 'AIR-Bench_24.05', not"),
        (lambda v: v.update(split="dev"), "split is 'dev', not 'test'"),
        (lambda v: v.update(model_name="x"), "model_name is 'x', not 'made__up'"),
    ],
)
def test_results_of_another_folder_are_refused(change, message, results, tmp_path):
    forge(results, change)
    seen = refusal(tmp_path)
    assert "qa/arxiv/en_default_test.json" in seen
    assert message in seen


def test_a_forged_record_without_a_change_passes(results, tmp_path):
    """Control of the test above: it is the change that is refused, not the forging."""
    forge(results, lambda values: None)
    assert submit(tmp_path).exists()


def test_results_and_submission_in_object_storage(tmp_path, monkeypatch):
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        folder, out = f"s3://{BUCKET}/results", f"s3://{BUCKET}/out"
        results_of(tmp_path / "results", OLD)
        upload_folder(tmp_path / "results", folder)
        results = open_results(folder, OLD, model_meta("made/up", "r1"))
        (dataset,) = air_bench_datasets(OLD, domains=["msmarco"])
        results.save(
            dataset, "test", FOUND,
            instruction="other", dataset_revision="c2", num_documents=2, scores={},
        )  # fmt: skip
        assert not results.finished(dataset, "test", "")
        assert results.finished(dataset, "test", "other")
        path = write_submission(folder, OLD, "made__up", out)
        assert path == f"s3://{BUCKET}/out/made__up_NoReranker.zip"
        packed = zipfile.ZipFile(io.BytesIO(read_bytes(path)))
        assert len(packed.namelist()) == 28
        with pytest.raises(ArtifactError, match="'made/up' at revision 'r1', not"):
            open_results(folder, OLD, model_meta("made/up", "r2"))


def test_an_earlier_zip_file_stays_when_the_new_one_is_refused(results, tmp_path):
    path = submit(tmp_path)
    before = path.read_bytes()
    record_path(results, "qa_arxiv_en_default").unlink()
    with pytest.raises(ArtifactError):
        submit(tmp_path)
    assert path.read_bytes() == before


def test_unknown_versions_names_and_retrievers(results, tmp_path):
    with pytest.raises(ConfigError, match="no version 'AIR-Bench_24'"):
        submit(tmp_path, "AIR-Bench_24")
    with pytest.raises(ConfigError, match="retriever's name"):
        submit(tmp_path, retriever="made/up")
    with pytest.raises(ArtifactError, match=r"no results of AIR-Bench_24.05 for the retriever"):
        submit(tmp_path, NEW)
