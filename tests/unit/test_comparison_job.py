"""jobs/compare_models.py from its arguments to its files, and what it refuses."""

from datetime import timedelta
from functools import partial

import pytest
from comparison_job import BEIR, compared_on_beir, results_on_beir, told_by
from made_results import DATE, write_benchmark, write_result
from own_words import own_evaluation

from rayembed.config.document import write_yaml
from rayembed.pipeline.evaluate.evaluate import evaluate
from rayembed_extras.comparison.benchmark_lines import benchmark_lines
from rayembed_extras.comparison.job import _labels, choose, run_compare_job
from rayembed_extras.comparison.results import StoredModel


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_on_beir(tmp_path_factory.mktemp("results"))


run = partial(told_by, run_compare_job)


def test_a_comparison_writes_tables_and_plots_and_says_what_to_run(results, tmp_path, capsys):
    _, rows = compared_on_beir(
        run_compare_job, capsys, results, tmp_path / "out", "--baseline", "part"
    )
    assert {row["model"] for row in rows} == {"whole", "part"}
    (mean,) = [r for r in rows if (r["model"], r["level"]) == ("whole", "benchmark")]
    assert (float(mean["score"]), mean["difference"]) == (50.0, "")
    (task,) = [r for r in rows if (r["model"], r["task"]) == ("whole", "SciFact")]
    assert float(task["difference"]) == 25.0


def test_every_task_is_shown_on_request_only(results, tmp_path, capsys):
    base = ("--results", results, "--benchmark", BEIR, "--output", tmp_path)
    assert "SciFact" not in run(capsys, *base)[1]
    assert " SciFact" in run(capsys, *base, "--tasks")[1]


def test_without_a_benchmark_every_task_with_results_is_compared(results, tmp_path, capsys):
    folder = tmp_path / "own"
    write_result(folder, "rayembed/whole", "abc123", "our-set", {("test", "default"): 0.75})
    code, out, _ = run(
        capsys, "--results", results, folder, "--output", tmp_path / "out", "--tasks"
    )
    assert code == 0
    assert "our-set" in out
    assert "Own tasks (1)" in out
    assert "--model rayembed/part --tasks" in out
    assert "CQADupstackTexRetrieval" in out


def test_own_sets_stand_in_the_category_that_their_evaluation_wrote(tmp_path, capsys):
    path = write_result(tmp_path, "rayembed/whole", "r", "our-set", {("test", "default"): 0.75})
    base = ("--results", tmp_path, "--output", tmp_path / "out", "--tasks")
    assert "Own tasks (1)" in run(capsys, *base)[1]
    row = {"task": "our-set", "type": "STS", "metric": "cosine_spearman", "dataset": "own/our-set"}
    row |= {"side": "text", "prompt": ""}
    record = {"conditions": {}, "prompts": [row]}
    path.with_name("prompts.yaml").write_text(write_yaml(record))
    code, out, _ = run(capsys, *base)
    assert code == 0
    assert "STS (1)" in out
    assert "Own tasks" not in out


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", ["org/part@d1", "org/whole@a1", "org/whole@a2", "other/whole@a1"]),
        ("part", ["org/part@d1"]),
        ("ORG/Part", ["org/part@d1"]),
        ("*/whole", ["org/whole@a1", "org/whole@a2", "other/whole@a1"]),
        ("wh*@a2", ["org/whole@a2"]),
        ("other/whole@a,part", ["other/whole@a1", "org/part@d1"]),
        ("part,org/*", ["org/part@d1", "org/whole@a1", "org/whole@a2"]),
    ],
)
def test_models_are_chosen_by_names_globs_and_revisions(wanted, chosen):
    known = [("org/part", "d1"), ("org/whole", "a1"), ("org/whole", "a2"), ("other/whole", "a1")]
    stored = [StoredModel(name, revision, ()) for name, revision in known]
    found = choose(stored, wanted.split(",") if wanted else ())
    assert [f"{model.name}@{model.revision}" for model in found] == chosen


def test_revisions_of_the_same_weights_have_labels_of_their_own():
    """Other software, other prompts: what stands behind the dash."""
    weights = "0123456789ab"
    stored = [StoredModel("org/one", f"{weights}-{end}", ()) for end in ("aa11bb22", "ab11bb22")]
    labels = _labels([*stored, StoredModel("org/two", "r1", ())], ())
    assert labels == [f"one@{weights}-aa", f"one@{weights}-ab", "two"]
    apart = [StoredModel("org/one", revision, ()) for revision in ("abc123-1", "fff999-1")]
    assert _labels(apart, ()) == ["one@abc123-1", "one@fff999-1"]


def test_of_two_revisions_it_asks_for_one(results, tmp_path, capsys):
    later = DATE + timedelta(days=3)
    write_benchmark(tmp_path, "rayembed/whole", "fff999", benchmark_lines(BEIR), 0.75, date=later)
    base = ("--results", results, tmp_path, "--benchmark", BEIR, "--output", tmp_path / "out")
    code, _, err = run(capsys, *base, "--models", "whole")
    assert code == 2
    assert "rayembed/whole@abc123  26 tasks, last 2026-01-31 12:00" in err
    assert "rayembed/whole@fff999  26 tasks, last 2026-02-03 12:00" in err
    code, out, _ = run(capsys, *base, "--models", "whole@fff")
    assert code == 0
    assert "75.00" in out
    code, out, _ = run(
        capsys, *base, "--models", "whole@fff,whole@abc", "--baseline", "whole@abc123"
    )
    assert code == 0
    assert "+25.00" in out
    assert "whole@fff999" in out
    both = (*base, "--models", "whole@fff,whole@abc", "--baseline")
    for name in ("rayembed/whole@abc123", "rayembed/whole@abc", "whole@a*", "Whole@abc"):
        code, out, _ = run(capsys, *both, name)
        assert (code, "+25.00" in out) == (0, True), name
    code, _, err = run(capsys, *both, "rayembed/whole")
    assert code == 2
    assert (
        "chooses 2 of the compared models, but only one can be the baseline; name one of whole@fff"
        in err
    )
    assert "whole@abc123" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "nothing to compare"),
        (("--results", "nowhere"), "no result files of mteb below nowhere"),
    ],
)
def test_what_is_asked_wrongly_ends_with_2(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--models", "hole"), "no results of 'hole'; did you mean 'whole'"),
        (("--models", "whole@zzz"), "allowed: rayembed/part@def456, rayembed/whole@abc123"),
        (("--baseline", "whole2"), "did you mean 'whole'"),
    ],
)
def test_names_that_are_not_there_get_the_nearest(results, argv, message, tmp_path, capsys):
    code, _, err = run(capsys, "--results", results, "--output", tmp_path, *argv)
    assert code == 2
    assert message in err


def test_results_that_cannot_be_read_end_with_2_and_name_the_model(tmp_path, capsys):
    path = write_result(tmp_path, "o/m", "r", "SciFact", {("test", "default"): 0.5})
    path.write_text("{")
    code, _, err = run(capsys, "--results", tmp_path, "--output", tmp_path / "out")
    assert code == 2
    assert "o/m has no result that can be read" in err


def test_a_place_that_cannot_be_written_ends_with_1(results, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = run(
        capsys, "--results", results, "--benchmark", BEIR, "--output", tmp_path / "file"
    )
    assert code == 1
    assert "file" in err


def test_rows_of_an_evaluation_are_models_with_intervals_and_costs(tmp_path, capsys):
    evaluate(own_evaluation(tmp_path))
    base = ("--results", tmp_path / "storage" / "evaluation", "--output", tmp_path / "to")
    text = (tmp_path / "to" / "scores.md").read_text() if run(capsys, *base)[0] == 0 else ""
    assert "| BM25 | **100.00** (+" in text, "rows beside a model are no baseline by default"
    assert "-hybrid | " in text
    assert "(95 %: " in text
    run(capsys, *base, "--price-per-hour", "2000")
    dearer = (tmp_path / "to" / "scores.md").read_text()
    prices = []
    for shown in (text, dearer):
        (row,) = [line for line in shown.splitlines() if line.startswith("| BM25 |")][:1]
        prices.append(float(row.strip("| ").split(" | ")[-1].replace(",", "")))
    assert prices[1] == pytest.approx(1000 * prices[0], rel=0.6), "to two decimals"


@pytest.mark.parametrize("price", ["0", "-1"])
def test_a_price_that_is_none_is_refused(results, capsys, price):
    code, _, err = run(capsys, "--results", results, f"--price-per-hour={price}")
    assert code == 2
    assert "--price-per-hour" in err
