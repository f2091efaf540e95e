"""jobs/papers/compare_with_papers.py from its arguments to its files, and what it refuses."""

from functools import partial

import pytest
from comparison_job import BEIR, compared_on_beir, results_on_beir, told_by
from made_results import write_benchmark

from rayembed_extras.comparison.benchmark_lines import benchmark_lines
from rayembed_papers.published.job import run_comparison_with_papers


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_on_beir(tmp_path_factory.mktemp("results"))


run = partial(told_by, run_comparison_with_papers)


def test_a_comparison_writes_tables_and_plots_and_says_what_to_run(results, tmp_path, capsys):
    out, rows = compared_on_beir(
        run_comparison_with_papers, capsys, results, tmp_path / "out", "--published", "nomic-v2-moe"
    )
    assert "-2.86" in out, "50 less Nomic's 52.86"
    assert {row["model"] for row in rows} == {"whole", "part", "Nomic Embed v2 MoE"}
    (mean,) = [r for r in rows if (r["model"], r["level"]) == ("whole", "benchmark")]
    assert (float(mean["score"]), float(mean["difference"])) == (50.0, pytest.approx(-2.86))


def test_a_model_that_is_called_as_a_papers_is_told_apart(tmp_path, capsys):
    write_benchmark(tmp_path, "jxm/cde-small-v1", "r", benchmark_lines(BEIR), 0.5)
    published = "cde-small-v1,cde-small-v1"
    code, out, _ = run(
        capsys,
        *("--results", tmp_path, "--benchmark", BEIR, "--published", published),
        *("--output", tmp_path / "out"),
    )
    assert code == 0
    table = out.partition("Written")[0]
    assert table.count("jxm/cde-small-v1") == 1
    assert table.count("cde-small-v1 [paper, baseline]") == 1
    assert "-3.30" in table, "50 less the paper's 53.3"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "nothing to compare"),
        (
            ("--models", "a", "--published", "nvembed-v2"),
            "name the folders of these results with --results",
        ),
        (("--published", "nvembed-v2"), "only be compared on a benchmark"),
        (("--published", "nvembed2", "--benchmark", BEIR), "did you mean 'nvembed-v2'"),
        (("--published", "nvembed-v2", "--benchmark", "BEER"), "did you mean 'BEIR'"),
        (("--list", "--benchmark", "BIER"), "did you mean 'BEIR'"),
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
        (
            ("--published", "nomic-v2-moe", "--benchmark", "AIR-Bench_24.04"),
            "published for BEIR, MIRACL",
        ),
        (("--published", "nomic-v2-moe"), "--published needs --benchmark"),
    ],
)
def test_names_that_are_not_there_get_the_nearest(results, argv, message, tmp_path, capsys):
    code, _, err = run(capsys, "--results", results, "--output", tmp_path, *argv)
    assert code == 2
    assert message in err


def test_the_papers_models_are_listed(capsys):
    code, out, _ = run(capsys, "--list", "--benchmark", "MIRACL")
    assert code == 0
    assert "nomic-v2-moe  (Nomic Embed v2 MoE)\n    MIRACL: Nomic Embed v2 MoE, Table 1\n" in out
    assert "nvembed-v2" not in out
