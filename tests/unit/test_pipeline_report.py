"""The summary of a run says how many of its steps were dropped."""

import pytest

from rayembed.pipeline.registration import RegisteredVersion
from rayembed.pipeline.report import Outcome, print_outcome
from rayembed.recipes.catalogue import get_recipe


@pytest.mark.parametrize(
    ("dropped", "line"), [(0, None), (1, "1 step was without"), (12, "12 steps were without")]
)
def test_dropped_steps_are_in_the_summary(dropped, line, capsys):
    outcome = Outcome(
        run=get_recipe("biencoder"),
        table=None,
        model_folder="/models/m",
        run_folder="/runs/r",
        version=RegisteredVersion("m", 1, "models:/m/1", "models:/m@candidate"),
        tracking_uri="sqlite:///m.db",
        dropped_steps=dropped,
        held_out=("pairs-held-out: 30 queries over 20 documents",),
    )
    print_outcome(outcome, mlflow_complete=True)
    printed = capsys.readouterr().out
    assert "models:/m@candidate" in printed
    assert "Held out   pairs-held-out: 30 queries over 20 documents" in printed
    assert ("Dropped" in printed) is (line is not None)
    assert line is None or line in printed
