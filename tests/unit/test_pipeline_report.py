"""The summary of a run: its scores with their noise and costs, its steps that were dropped."""

import shlex
from types import SimpleNamespace

import numpy as np
import pytest

from rayembed.display.tables import show
from rayembed.evaluation.tables import UNTRAINED, ScoreKey, score_table
from rayembed.pipeline.register.registration import RegisteredVersion
from rayembed.pipeline.run.report import (
    Outcome,
    gains_table,
    print_outcome,
    scores_table,
    without_hybrids_of_others,
)
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.card_parts import how_to_score
from rayembed.results.costs import Cost


@pytest.mark.parametrize(
    ("dropped", "line"), [(0, None), (1, "1 step was without"), (12, "12 steps were without")]
)
def test_dropped_steps_are_in_the_summary(dropped, line, capsys):
    outcome = Outcome(
        run=get_recipe("biencoder"),
        scores={},
        model_folder="/models/m",
        run_folder="/runs/r",
        version=RegisteredVersion("m", 1, "models:/m/1", "models:/m@candidate"),
        tracking_uri="sqlite:///m.db",
        dropped_steps=dropped,
        rejected=("pairs: 9 of 90 rows (10.0%)",),
        held_out=("pairs-held-out: 30 queries over 20 documents",),
    )
    print_outcome(outcome, mlflow_complete=True)
    printed = capsys.readouterr().out
    assert "models:/m@candidate" in printed
    assert "Held out   pairs-held-out: 30 queries over 20 documents" in printed
    assert "Rejected   pairs: 9 of 90 rows (10.0%)" in printed
    assert ("Dropped" in printed) is (line is not None)
    assert line is None or line in printed


def test_the_summary_names_the_prompts_where_none_is_the_default(capsys):
    run = get_recipe("biencoder")
    (pairs,) = run.data.datasets
    told = pairs.model_copy(update={"query_instruction": "Find it"})
    other = pairs.model_copy(update={"name": "other", "query_instruction": "Find that"})
    stage = run.stages[0].model_copy(update={"datasets": {"pairs": 1.0, "other": 1.0}})
    for datasets, warned in (((told,), False), ((told, other), True)):
        data = run.data.model_copy(update={"datasets": datasets})
        version = RegisteredVersion("m", 1, "models:/m/1", "models:/m@candidate")
        given = run.model_copy(update={"data": data, "stages": (stage,)})
        done = Outcome(given, {}, "/models/m", "/runs/r", version, "sqlite:///m.db", 0)
        print_outcome(done, mlflow_complete=True)
        printed = capsys.readouterr().out
        assert ("name one, prompt_name='pairs' or 'other'" in printed) is warned


def test_commands_that_are_printed_work_with_any_path(capsys):
    """Of a space or a quote a shell would make another word."""
    place = "/runs of Zoë's/r"
    version = RegisteredVersion("m", 1, "models:/m/1", "models:/m@candidate")
    run = get_recipe("biencoder")
    uri = f"sqlite:///{place}/mlflow.db"
    done = Outcome(run, {}, f"{place}/m", place, version, uri, 0)
    print_outcome(done, mlflow_complete=True)
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "mlflow ui" in line]
    command = told.removeprefix("MLflow ")
    assert shlex.split(command) == ["mlflow", "ui", "--backend-store-uri", uri]

    told = how_to_score(f"{place}/m", storage=place, tracking_uri=uri)
    score, register = (shlex.split(command) for command in told.split("`")[1::2])
    assert {f"{place}/m", f"placement.storage_path={place}"} <= {*score}
    assert {f"placement.tracking_uri={uri}"} <= {*score}
    assert {f"{place}/m", place, uri, f"{place}/evaluation"} <= {*register}


def test_scores_have_their_noise_their_baselines_and_their_costs():
    generator = np.random.default_rng(0)
    words, start = generator.uniform(0, 1, 200), generator.uniform(0, 1, 200)
    stage = ScoreKey(get_recipe("biencoder").stages[-1].name)

    def scored(speed, **queries):
        return SimpleNamespace(
            scores={task: values.mean() for task, values in queries.items()},
            items={task: [values] for task, values in queries.items()},
            costs={task: Cost(100, 100 / speed, 64.0) for task in queries},
        )

    better = {"a": start + 0.1, "b": words + generator.normal(0, 0.1, 200)}
    scores = {
        UNTRAINED: scored(50, a=start, b=words),
        stage: scored(50, **better),
        ScoreKey(baseline="bm25"): scored(2000, a=words),
        ScoreKey(stage.stage, beside="hybrid"): scored(40, a=better["a"] + 0.05, b=better["b"]),
    }
    run = get_recipe("biencoder")
    table = scores_table(run, scores)
    label = stage.label([stage.stage])
    assert (label, "b") in table.noise
    assert (label, "a") not in table.noise
    assert "(+0.100) |" in show(score_table(table), "markdown")
    assert ", within noise)" in show(score_table(table), "markdown")
    lines = show(gains_table(run, scores), "markdown").splitlines()
    assert lines[0] == "| Model | Less | Mean difference | Documents/s | Bytes/document |"
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines[2:]}
    assert cells["untrained"][1:3] == ["", "–"]
    assert cells[label][1] == "untrained"
    assert cells["BM25"][1] == label
    assert cells["BM25"][2].endswith(", 1 of 2 tasks")
    assert cells["BM25"][3:] == ["2,000", "64 |"]
    hybrid = cells[f"hybrid: BM25 and {label}"]
    assert hybrid[1] == label
    assert hybrid[2].startswith("+0.025 (95 %: +0.025 to +0.025)")


def test_of_mixtures_only_the_kept_one_has_a_row_of_hybrid_search():
    stages = ["s"]
    assert ScoreKey(beside="hybrid").label(stages) == "hybrid: BM25 and untrained"
    half = ScoreKey("s", share=0.5, beside="hybrid")
    assert half.label(stages) == "hybrid: BM25 and merged, 50% trained"
    assert ScoreKey("s", beside="reranked").label(stages) == "reranked: stage 1: s"
    every = {ScoreKey("s"): 0, half: 1, ScoreKey("s", share=0.25, beside="hybrid"): 2}
    assert list(without_hybrids_of_others(every, ScoreKey("s", share=0.5)).values()) == [0, 1]
    assert list(without_hybrids_of_others(every, ScoreKey("s")).values()) == [0]
