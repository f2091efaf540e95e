"""Checkpoints are stored beside the training, one at a time, and none is forgotten."""

import logging
import threading
import time

import pytest

from rayembed.errors import StorageError
from rayembed.training.callbacks import Preemption
from rayembed.training.checkpoints import uploads as module
from rayembed.training.checkpoints.uploads import Uploads


@pytest.fixture
def part(tmp_path):
    """Makes a folder with this worker's part of a step's checkpoint."""

    def make(step):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "state").write_text(str(step))
        return folder

    return make


def trains(part, step, store, error=None):
    """A training with one upload, which goes on after it has begun, and then may fail."""
    with Uploads() as uploads:
        uploads.start(step, part(step), store)
        if error is not None:
            raise error
        return uploads


def fails(folder):
    raise StorageError("full")


def test_one_is_on_its_way_at_a_time(part, tmp_path):
    running, most, stored, begun = [], [], [], threading.Event()

    def store(folder):
        begun.wait(20)  # the training goes on while the first one is on its way
        running.append(folder)
        most.append(len(running))
        time.sleep(0.05)
        stored.append((folder / "state").read_text())
        running.remove(folder)

    with Uploads() as uploads:
        uploads.start(1, part(1), store)
        assert not stored
        begun.set()
        uploads.start(2, part(2), store)
        assert stored[0] == "1"
        uploads.start(3, part(3), store)
    assert stored == ["1", "2", "3"]
    assert max(most) == 1
    assert not list(tmp_path.iterdir())  # what is stored is removed here


def test_an_error_is_raised_at_each_look(part, tmp_path):
    uploads = Uploads()
    uploads.on_step_end({})
    uploads.start(1, part(1), fails)
    for look in (
        uploads.wait,
        lambda: uploads.on_step_end({}),
        lambda: uploads.start(2, part(2), fails),
    ):
        with pytest.raises(StorageError, match="full"):
            look()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]  # the trainer removes it


def test_the_end_without_an_error_raises_and_with_one_tells(part, caplog):
    with pytest.raises(StorageError):
        trains(part, 1, fails)
    with pytest.raises(ZeroDivisionError):
        trains(part, 2, fails, ZeroDivisionError())
    assert "the checkpoint of step 2 is not stored: full" in caplog.text


def test_an_error_waits_for_an_upload_and_not_for_ever(part, monkeypatch):
    stored, ends = [], threading.Event()

    def store(folder):
        time.sleep(0.2)
        stored.append(folder)

    with pytest.raises(ZeroDivisionError):
        trains(part, 1, store, ZeroDivisionError())
    assert stored
    monkeypatch.setattr(module, "_AFTER_AN_ERROR_SECONDS", 0.1)
    with pytest.raises(ZeroDivisionError):
        trains(part, 2, lambda folder: ends.wait(60), ZeroDivisionError())
    ends.set()


def test_a_training_that_waits_long_says_so(part, monkeypatch, caplog):
    monkeypatch.setattr(module, "_WORTH_TELLING_SECONDS", 0.1)
    with caplog.at_level(logging.INFO, "rayembed"), Uploads() as uploads:
        uploads.start(4, part(4), lambda folder: time.sleep(0.3))
    assert "for the upload of the checkpoint of step 4" in caplog.text


@pytest.mark.parametrize("announced", [True, False])
def test_the_checkpoint_of_an_announced_end_is_waited_for(announced, tmp_path):
    asked = []
    notice = Preemption(lambda: announced, look_seconds=0.0, stored=lambda: asked.append(True))
    notice.on_train_start(type("Trainer", (), {"device": "cpu"}), 0)
    assert notice.should_save(1) is announced
    notice.on_checkpoint(1, tmp_path)
    assert bool(asked) is announced
