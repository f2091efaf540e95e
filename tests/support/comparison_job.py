"""A job that compares models, run on the results of two models on BEIR."""

import csv

from made_results import two_models

from rayembed_extras.comparison.benchmark_lines import benchmark_lines

BEIR = "BEIR"


def results_on_beir(folder):
    """Two models on BEIR: one complete, one without NQ and one of CQADupstack's forums."""
    return two_models(folder, benchmark_lines(BEIR))


def told_by(job, capsys, *argv):
    """Exit code, output and errors of a job."""
    code = job([str(arg) for arg in argv], about="")
    told = capsys.readouterr()
    return code, told.out, told.err


def compared_on_beir(job, capsys, results, folder, *argv):
    """Output and CSV rows of a comparison, which say of the two models what all comparisons do."""
    base = ("--results", results, "--benchmark", BEIR, "--output", folder)
    code, out, err = told_by(job, capsys, *base, *argv)
    assert (code, err) == (0, "")
    names = ("scores.md", "scores.csv", "categories.png", "differences.png")
    for name in names:
        assert f"Written  {folder / name}" in out
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert "13 of 15" in out
    assert (
        "rayembed evaluate --model rayembed/part --benchmark BEIR  # 2 of 15 tasks are missing"
    ) in out
    assert "--model rayembed/whole" not in out
    assert "part: begun, not complete: CQADupstackRetrieval" in out
    assert max(map(len, out.partition("Written")[0].splitlines())) <= 120
    with (folder / "scores.csv").open() as file:
        return out, list(csv.DictReader(file))
