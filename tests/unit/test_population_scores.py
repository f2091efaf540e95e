"""When the scores of a population's member are told: with the checkpoint that others go on from."""

import threading
from pathlib import Path

import pytest
import torch
from tiny_job import make_run

from rayembed.pipeline.sweep_trial import PopulationScores
from rayembed.training.checkpoint import POSITION, expected_position, save_checkpoint
from rayembed.training.checkpoint_list import checkpoint_name
from rayembed.tuning.events import Event, Start

SECONDS = 30


class Engine:
    def optimizer_state(self):
        yield "layer", {"weight": torch.zeros(2)}


class Told:
    """What was told, which can be waited for."""

    def __init__(self):
        self.steps: list[int] = []
        self._changed = threading.Condition()

    def __call__(self, event):
        with self._changed:
            self.steps.append(event.global_step)
            self._changed.notify_all()

    def reach(self, steps):
        with self._changed:
            assert self._changed.wait_for(lambda: self.steps == steps, SECONDS), self.steps


@pytest.fixture
def start(tmp_path):
    return Start(make_run(tmp_path), 2, {})


@pytest.fixture
def folder(start) -> Path:
    run = start.run
    place = Path(run.placement.storage_path, "runs", run.name, run.stages[0].name, "train")
    place.mkdir(parents=True)
    return place


def save(folder, step):
    place = folder / checkpoint_name(step)
    place.mkdir()
    save_checkpoint(place, Engine(), expected_position("retrieval", "run", "plan").at(step))


def score(step):
    return Event("score", step, 0.5)


def test_a_score_waits_for_its_checkpoint(start, folder):
    told = Told()
    save(folder, 4)
    with PopulationScores(start, told) as scores:
        scores.tell(score(6))
        scores.tell(score(4))
        told.reach([4])
        save(folder, 6)
        told.reach([4, 6])


def test_known_scores_and_those_without_a_checkpoint_are_not_told(start, folder, caplog):
    told = Told()
    for step in (2, 6):
        save(folder, step)
    (folder / checkpoint_name(10)).mkdir()
    with PopulationScores(start, told) as scores:
        for step in (2, 4, 6, 10):  # 4 was removed, and the training of 10 ends before it is whole
            scores.tell(score(step))
        told.reach([6])
    assert told.steps == [6]
    assert "no whole checkpoint of step 10" in caplog.text
    assert "step 4" not in caplog.text


def test_the_last_score_is_told_before_the_end_also_of_a_training_that_fails(start, folder):
    told = Told()

    def fail():
        with PopulationScores(start, told) as scores:
            save(folder, 4)
            scores.tell(score(4))
            raise RuntimeError("made up")

    with pytest.raises(RuntimeError, match="made up"):
        fail()
    assert told.steps == [4]


def test_a_storage_that_does_not_answer_is_asked_again(start, folder, caplog):
    told = Told()
    save(folder, 4)
    position = folder / checkpoint_name(4) / POSITION
    kept = position.read_bytes()
    position.unlink()
    position.symlink_to(position)  # "too many levels of symbolic links" when it is opened
    with PopulationScores(start, told) as scores:
        scores.tell(score(4))
        while "looked for again" not in caplog.text:
            assert told.steps == []
        position.unlink()
        position.write_bytes(kept)
        told.reach([4])
