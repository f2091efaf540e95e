"""mteb's result files read back: complete and not, aggregates, several folders, broken files."""

import json
import logging

import mteb
import pytest
from made_results import DATE, write_benchmark, write_result
from s3_server import BUCKET, s3_server

from rayembed.assets.storage import join, write_atomic
from rayembed.errors import ArtifactError, StorageError
from rayembed.evaluation.averages import MEAN_OF_16
from rayembed.results import files as result_files
from rayembed_extras.comparison.benchmark_lines import (
    MEAN,
    OWN,
    Line,
    average_groups,
    averages,
    benchmark_lines,
    result_lines,
)
from rayembed_extras.comparison.compare import score_of
from rayembed_extras.comparison.results import read_model, stored_models

PLAIN = Line("SciFact", "Retrieval", "ndcg_at_10", "SciFact", (("test", "default"),))
FOUR = (("test", "de"), ("test", "en"), ("dev", "de"), ("dev", "en"))
TWO_BY_TWO = Line("X", "STS", "cosine_spearman", "X", FOUR)


def one_model(folder):
    (model,) = stored_models([folder])
    return model


def test_models_revisions_and_files_are_found(tmp_path):
    write_result(tmp_path, "org/a__b", "r1", "SciFact", {("test", "default"): 0.5})
    write_result(tmp_path, "org/a__b", "r2", "SciFact", {("test", "default"): 0.6})
    write_result(tmp_path, "org/c", "r1", "NFCorpus", {("test", "default"): 0.7})
    found = stored_models([tmp_path])
    assert [(model.name, model.revision) for model in found] == [
        ("org/a__b", "r1"),
        ("org/a__b", "r2"),
        ("org/c", "r1"),
    ]
    assert all(len(model.files) == 1 for model in found), "model_meta.json is no result"
    assert stored_models([tmp_path / "results"]) == found, "the folder of the models itself"
    assert stored_models([tmp_path / "nothing"]) == ()


def test_what_a_file_says_is_what_mteb_reads(tmp_path):
    path = write_result(
        tmp_path, "o/m", "r", "X", {("test", "de"): 0.25, ("dev", "en"): 0.75}, version="2.26.24"
    )
    file = read_model(one_model(tmp_path))["X"]
    theirs = mteb.TaskResult.from_disk(path)
    assert file.scores == {("test", "de"): 0.25, ("dev", "en"): 0.75}
    assert (file.dataset_revision, file.mteb_version) == ("own", theirs.mteb_version)
    assert file.date == DATE == theirs.date
    (line,) = result_lines({"X": file.scores})
    assert score_of(line, {"X": file}).score == pytest.approx(theirs.get_score()) == 0.5


def test_a_score_is_the_mean_over_all_splits_and_subsets_or_is_missing(tmp_path):
    scores = {("test", "de"): 0.1, ("test", "en"): 0.2, ("dev", "de"): 0.3, ("dev", "en"): 0.8}
    write_result(tmp_path, "o/m", "r", "X", {**scores, ("test", "fr"): 0.0})
    results = read_model(one_model(tmp_path))
    found = score_of(TWO_BY_TWO, results)
    assert (found.score, found.missing) == (pytest.approx(0.35), ())
    del scores["dev", "en"]
    write_result(tmp_path, "o/m", "r", "X", {**scores, ("dev", "en"): float("nan")})
    found = score_of(TWO_BY_TWO, read_model(one_model(tmp_path)))
    assert (found.score, found.missing) == (None, ("dev/en",))
    assert score_of(PLAIN, results).missing == ("SciFact",)


def test_an_aggregate_is_the_mean_of_its_parts_or_its_own_file(tmp_path):
    (line,) = [one for one in benchmark_lines("BEIR") if one.parts]
    assert (line.task, len(line.parts)) == ("CQADupstackRetrieval", 12)
    values = {part.task: number / 100 for number, part in enumerate(line.parts)}
    write_benchmark(tmp_path, "o/m", "r", [line], values.__getitem__)
    write_result(tmp_path, "o/m", "r", line.task, {("test", "default"): 0.99})
    results = read_model(one_model(tmp_path))
    assert score_of(line, results).score == pytest.approx(sum(range(12)) / 1200)
    gone = line.parts[3].task
    del results[gone]
    assert score_of(line, results).score == 0.99, "parts are not needed where mteb wrote the mean"
    del results[line.task]
    assert score_of(line, results).missing == (gone,)


def test_files_that_are_no_results_are_told_and_left_out(tmp_path, caplog):
    good = write_result(tmp_path, "o/m", "r", "SciFact", {("test", "default"): 0.5})
    half = good.with_name("NFCorpus.json")
    half.write_text(good.read_text()[:-40])
    good.with_name("notes.json").write_text(json.dumps({"anything": [1, 2]}))
    good.with_name("list.json").write_text("[]")
    good.with_name("run_settings.jsonl").write_text("{}\n")
    (tmp_path / "results" / "readme.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        results = read_model(one_model(tmp_path))
    assert list(results) == ["SciFact"]
    told = {record.args[0].rpartition("/")[2] for record in caplog.records if record.args}
    assert told == {"NFCorpus.json", "notes.json", "list.json"}


@pytest.mark.parametrize("error", [StorageError, ArtifactError])
def test_a_storage_that_fails_is_no_file_without_a_result(error, tmp_path, monkeypatch, caplog):
    """A file that is gone since the folder was listed is: the control."""
    write_result(tmp_path, "o/m", "r", "SciFact", {("test", "default"): 0.5})
    model = one_model(tmp_path)

    def fails(address):
        raise error(f"cannot read {address!r}")

    monkeypatch.setattr(result_files, "read_bytes", fails)
    if error is ArtifactError:
        assert read_model(model) == {}
        assert "is not a result file of mteb, so it is left out: cannot read" in caplog.text
    else:
        with pytest.raises(StorageError, match=r"cannot read '.*SciFact.json'"):
            read_model(model)
        assert caplog.text == ""


def test_a_result_of_an_old_mteb_is_read(tmp_path):
    place = tmp_path / "results" / "o__m" / "r"
    place.mkdir(parents=True)
    content = {
        "mteb_dataset_name": "SciFact",
        "mteb_version": "1.0.2",
        "dataset_revision": "old",
        "test": {"ndcg_at_10": 0.64, "evaluation_time": 3.0},
    }
    (place / "SciFact.json").write_text(json.dumps(content))
    results = read_model(one_model(tmp_path))
    assert score_of(PLAIN, results).score == 0.64
    assert results["SciFact"].date is None


def test_of_two_folders_the_first_counts(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_result(first, "o/m", "r", "SciFact", {("test", "default"): 0.1})
    write_result(second, "o/m", "r", "SciFact", {("test", "default"): 0.2})
    write_result(second, "o/m", "r", "NFCorpus", {("test", "default"): 0.3})
    (model,) = stored_models([first, second])
    results = read_model(model)
    assert {task: file.scores["test", "default"] for task, file in results.items()} == {
        "SciFact": 0.1,
        "NFCorpus": 0.3,
    }


def test_results_in_object_storage(tmp_path, monkeypatch):
    path = write_result(tmp_path, "o/m", "r", "SciFact", {("test", "default"): 0.5})
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        address = f"s3://{BUCKET}/scores"
        write_atomic(join(address, "results", "o__m", "r", "SciFact.json"), path.read_bytes())
        model = one_model(address)
        assert model.files == (f"{address}/results/o__m/r/SciFact.json",)
        assert read_model(model)["SciFact"].scores == {("test", "default"): 0.5}


def test_lines_of_found_results_leave_out_parts_and_keep_own_tasks():
    place = [("test", "default")]
    names = ("our-set", "WikiRelatednessSTS", "STS12")
    forums = ("CQADupstackRetrieval", "CQADupstackTexRetrieval")
    measures = {"WikiRelatednessSTS": ("STS", "cosine_spearman")}
    lines = result_lines(dict.fromkeys((*names, *forums), place), measures)
    assert [(line.name, line.category) for line in lines] == [
        ("CQADupstackRetrieval", "Retrieval"),
        ("STS12", "STS"),
        ("WikiRelatednessSTS", "STS"),
        ("our-set", OWN),
    ]
    alone = result_lines({"CQADupstackTexRetrieval": place})
    assert [line.name for line in alone] == ["CQADupstackTexRetrieval"]


def test_found_results_are_compared_on_what_any_model_is_scored_on(tmp_path):
    write_result(tmp_path, "o/a", "r", "X", {("test", "de"): 0.2, ("test", "en"): 0.6})
    write_result(tmp_path, "o/b", "r", "X", {("test", "en"): 0.7})
    both = [read_model(model) for model in stored_models([tmp_path])]
    (line,) = result_lines({"X": [place for files in both for place in files["X"].scores]})
    assert line.places == (("test", "de"), ("test", "en"))
    assert score_of(line, both[0]).score == pytest.approx(0.4)
    assert score_of(line, both[1]).missing == ("test/de",)


def test_averages_are_over_tasks_and_complete_ones_only():
    lines = [
        Line("a", "Retrieval", "", "a"),
        Line("b", "Retrieval", "", "b"),
        Line("c", "Retrieval", "", "c"),
        Line("d", "STS", "", "d"),
    ]
    groups = average_groups("any", lines)
    assert list(groups) == ["Retrieval", "STS", MEAN]
    scores = {"a": 10.0, "b": 20.0, "c": 60.0, "d": 90.0}
    assert averages(scores, groups) == {"Retrieval": 30.0, "STS": 90.0, MEAN: 45.0}
    del scores["b"]
    assert averages(scores, groups) == {"STS": 90.0}
    assert list(average_groups("any", lines[:3])) == [MEAN], "one category is the whole"


def test_miracl_has_a_line_for_each_language_and_two_means():
    lines = benchmark_lines("MIRACL")
    groups = average_groups("MIRACL", lines)
    assert {name: len(members) for name, members in groups.items()} == {MEAN_OF_16: 16, MEAN: 18}
    names = {line.name for line in groups[MEAN]} - {line.name for line in groups[MEAN_OF_16]}
    assert names == {"MIRACLRetrieval (de)", "MIRACLRetrieval (yo)"}
