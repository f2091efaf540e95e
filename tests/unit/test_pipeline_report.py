"""The summary of a run says how many of its steps were dropped."""

import shlex

import pytest

from rayembed.pipeline.register.registration import RegisteredVersion
from rayembed.pipeline.run.report import Outcome, print_outcome
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.card_parts import how_to_score


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
