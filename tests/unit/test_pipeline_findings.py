"""Findings about finished scores: made, printed, stored, and never at the cost of scores."""

import io
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from made_results import write_result

from rayembed.config import table
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.reports import FindingKind
from rayembed.config.settings import parse
from rayembed.display.tables import Table
from rayembed.errors import ConfigError
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.score import ModelScores
from rayembed.pipeline.evaluate.evaluate import EvaluationResult, with_findings
from rayembed.pipeline.evaluate.findings import (
    ComparedModels,
    Finding,
    ScoredModels,
    log_findings,
    make_findings,
    print_findings,
)

HERE = __name__
KINDS = {
    "seen": FindingKind("Texts that were seen", f"{HERE}:seen", f"{HERE}:compared"),
    "broken": FindingKind("Broken", f"{HERE}:broken"),
    "gone": FindingKind("Gone", "no_such_package:find"),
    "silent": FindingKind("Silent", f"{HERE}:silent"),
    "named": FindingKind("Named like a result", f"{HERE}:named"),
}

VALUES = {"model": {"reference": "bm25"}, "tasks": ["SciFact"]}


def seen(subject):
    rows = [[label, subject.judged.meta.name] for label in subject.models]
    table = Table(["Model", "Name"], rows)
    metrics = {"clean": {"task": 0.5}}
    return Finding(table, ("1 of 2 queries was seen.",), metrics, {"seen.csv": "a,b\n"})


def compared(subject):
    lines = [f"{label}: {len(folders)} folders" for label, folders in subject.results.items()]
    return Finding(lines=tuple(lines), files={"seen.html": b"<p>"})


def broken(subject):
    raise KeyError("no such column")


def silent(subject):
    return None


def named(subject):
    return Finding(files={"other.json": "{}"})


@pytest.fixture
def kinds(monkeypatch):
    points = [EntryPoint(name, f"{HERE}:KINDS", "rayembed.findings") for name in KINDS]
    monkeypatch.setattr(table, "entry_points", lambda group: points)
    monkeypatch.setattr(table, "from_outside", lambda point: KINDS[point.name])


@pytest.fixture
def scored(tmp_path):
    write_result(tmp_path, "rayembed/m", "r", "task", {("test", "default"): 0.75})
    folder = tmp_path / "results" / "rayembed__m" / "r"
    return ModelScores(model_meta("m", "r"), str(folder), folder)


def subject_of(scored):
    return ScoredModels({"m": scored}, "m", None, "/models/m", "/storage")


def test_findings_are_printed_and_their_files_lie_beside_the_results(kinds, scored):
    (finding,) = make_findings(subject_of(scored), ["seen"])
    assert (scored.local / "seen.csv").read_text() == "a,b\n"
    out = io.StringIO()
    print_findings([finding], out)
    assert "rayembed/m" in out.getvalue()
    assert "Texts that were seen: 1 of 2 queries was seen." in out.getvalue()
    assert finding.section.startswith("### Texts that were seen\n\n| Model | Name |")
    assert "1 of 2 queries was seen." in finding.section


def test_a_finding_that_fails_is_a_line_with_its_reason_and_stops_no_other(kinds, scored):
    made = make_findings(subject_of(scored), None)
    lines = {finding.title: finding.lines for finding in made}
    assert set(lines) == {"Texts that were seen", "Broken", "Gone", "Named like a result"}
    assert lines["Broken"] == (
        "the analysis 'broken' is missing, because it failed: 'no such column'",
    )
    assert "no_such_package" in lines["Gone"][0]
    assert "other.json" in lines["Named like a result"][0], "it would be read as a result"
    assert not (scored.local / "other.json").exists()


def test_settings_choose_findings_and_change_no_fingerprint(kinds):
    def run(**placement):
        return parse(EvaluationRun, VALUES | {"placement": placement})

    assert run(findings=["seen"]).fingerprint == run().fingerprint
    assert make_findings(None, run(findings=[]).placement.findings) == ()
    with pytest.raises(ConfigError, match=r"no finding for placement\.findings 'sen'.*'seen'"):
        run(findings=["sen"])


def test_an_evaluation_has_the_findings_of_its_settings_and_none_without_scores(kinds, scored):

    run = parse(EvaluationRun, {**VALUES, "placement": {"findings": ["broken"]}})
    assert with_findings(EvaluationResult(run, scored)).findings == ()
    scored.tasks = [Scoring]
    (finding,) = with_findings(EvaluationResult(run, scored)).findings
    assert finding.title == "Broken"


class Scoring:
    name, score, result, factory = "task", 0.75, None, None


def test_metrics_and_files_go_to_mlflow(kinds, scored):
    sent = []

    class Tracker:
        def log_scores(self, name, values, step):
            sent.append((name, values, step))

        def log_artifact(self, path, folder):
            sent.append((Path(path).read_text(), folder))

    findings = make_findings(subject_of(scored), ["seen", "broken"])
    log_findings(findings, Tracker(), 7, scored.local)
    assert sent == [("clean", {"task": 0.5}, 7), ("a,b\n", "findings")]


def test_a_comparison_has_findings_of_its_own(kinds, tmp_path):
    made = make_findings(ComparedModels({"a": ("x",)}, "a", str(tmp_path)), None)
    assert [finding.lines for finding in made] == [("a: 1 folders",)], "of those that compare"
    assert (tmp_path / "seen.html").read_bytes() == b"<p>"
