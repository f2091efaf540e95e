"""The loop over steps with a made-up engine: when checkpoints are made."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from told import Told

from rayembed.config.placement import Placement
from rayembed.data.plan import stream as stream_module
from rayembed.errors import DataError
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.callbacks import Preemption
from rayembed.training.objective import Objective, StepReport, StepSettings
from rayembed.training.trainer import StageTrainer

CPU = torch.device("cpu")
STEPS = 8


@dataclass
class Engine:
    """Takes no steps."""

    model = torch.nn.Linear(1, 1)
    forward = model

    def backward(self, loss, last):
        raise AssertionError("nothing is learnt")

    def step(self, factor):
        return factor, 0.0

    def written_states(self):
        return iter(())


class Nothing(Objective):
    """Steps in which nothing is done."""

    def batches(self, plan, model, stage, seed):
        return lambda step: SimpleNamespace(step=step)

    def run_step(self, *_):
        return StepReport(1.0, 1, 1, 1, 1, {})

    def source(self, plan, step):
        return f"set {step}"


def checkpoints(every, first=0, last=STEPS, callbacks=(), **asked):
    stage = get_recipe("biencoder").stages[0]
    stage = stage.model_copy(update={"steps": STEPS, "checkpoint_every_steps": every})
    saved, records = [], []
    told = Told(on_step=records.append, on_checkpoint=saved.append, **asked)
    trainer = StageTrainer(
        stage,
        Placement(),
        Engine.model,
        Nothing(),
        SimpleNamespace(fingerprint="plan", teachers=()),
        seed=0,
        callbacks=[told, *callbacks],
        stream=lambda make, first, *_: (make(step) for step in range(first, last)),
    )
    trainer.train(Engine(), StepSettings(1, True, CPU), first)
    assert {record["workers"] for record in records} == {1}
    return saved


def test_a_checkpoint_every_so_many_steps_and_at_the_end():
    assert checkpoints(3) == [3, 6, 8]
    assert checkpoints(3, first=4) == [6, 8]
    assert checkpoints(3, ends_after=lambda step: step == 5) == [3, 5]
    with pytest.raises(DataError, match="batch plan has only 7 of 8 steps"):
        checkpoints(3, last=7)


def test_a_checkpoint_out_of_turn_is_asked_for_after_the_steps_that_have_none():
    asked = []

    def saves_now():
        asked.append(None)
        return len(asked) == 3

    assert checkpoints(3, saves_now=saves_now) == [3, 4, 6, 8]
    assert len(asked) == 5  # after steps 1, 2, 4, 5, 7


@pytest.mark.parametrize(
    ("asked", "use_gpu", "expected"),
    [(None, True, 4), (None, False, 0), (0, True, 0), (3, False, 3)],
)
def test_a_trainer_has_as_many_processes_as_asked_or_as_the_machine_and_the_model_want(
    asked, use_gpu, expected, monkeypatch
):
    monkeypatch.setattr(stream_module, "num_cores", lambda: 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    taken = []

    def stream(make, first, last, processes, named):
        taken.append((processes, named))
        return map(make, range(first, last))

    trainer = StageTrainer(
        get_recipe("biencoder").stages[0].model_copy(update={"steps": 1}),
        Placement(step_processes=asked, use_gpu=use_gpu),
        Engine.model,
        Nothing(),
        SimpleNamespace(fingerprint="plan", teachers=()),
        seed=0,
        stream=stream,
    )
    trainer.train(Engine(), StepSettings(1, True, CPU))
    assert taken == [(expected, asked is not None)]


def test_a_notice_makes_one_checkpoint():
    answers = iter([False, True])
    notice = Preemption(lambda: next(answers), look_seconds=0.0)
    assert checkpoints(4, callbacks=[notice]) == [2, 4, 8]


def test_a_notice_is_not_looked_for_all_the_time():
    def ask():
        raise AssertionError("too early")

    assert checkpoints(4, callbacks=[Preemption(ask, look_seconds=60.0)]) == [4, 8]


def test_a_callback_of_ones_own_stops_a_stage():
    """That of docs/own_training.md; the loss here is always the same."""
    page = Path(__file__).resolve().parents[2] / "docs" / "own_training.md"
    code = re.search(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)[1]
    names = {"__name__": "page"}
    exec(code, names)
    assert checkpoints(3, callbacks=[names["StopAtPlateau"](4)]) == [3, 5]
    assert checkpoints(3, callbacks=[names["StopAtPlateau"](9)]) == [3, 6, 8]
