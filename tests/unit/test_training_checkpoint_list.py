"""Ray Train's list of checkpoints after faults: what Train itself then reads from it."""

import json
import shutil
from pathlib import Path

import pytest
import ray
import torch
from ray.train import CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from s3_server import BUCKET, s3_server

from rayembed.assets.storage import list_files, upload_folder
from rayembed.errors import ArtifactError, StorageError
from rayembed.training.checkpoints.checkpoint import (
    POSITION,
    Checkpoint,
    expected_position,
    find_damage,
    save_checkpoint,
)
from rayembed.training.checkpoints.checkpoint_list import (
    LIST_FILE,
    checkpoint_name,
    listed_checkpoints,
    repair_checkpoint_list,
)

POSITIONS = expected_position("only", "run", "plan")


class Engine:
    def written_states(self):
        yield "layer", {"weight": torch.zeros(100), "exp_avg": torch.ones(100)}


def save(folder: Path, step: int) -> Path:
    place = folder / checkpoint_name(step)
    place.mkdir()
    save_checkpoint(place, Engine(), POSITIONS.at(step))
    return place


def manager(folder: Path) -> CheckpointManager:
    """Train's own keeper of the list, as its controller makes it when it starts."""
    storage = StorageContext(folder.parent, folder.name)
    return CheckpointManager(CheckpointConfig(num_to_keep=3), storage)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three checkpoints of steps 4, 8 and 12, listed by Train itself."""
    folder = tmp_path / "train"
    keeper = manager(folder)
    monkeypatch.setattr(keeper, "_notify", lambda: None)  # it would need a running event loop
    for step in (4, 8, 12):
        checkpoint = ray.train.Checkpoint.from_directory(save(folder, step))
        report = _TrainingReport(
            checkpoint=checkpoint, metrics={"step": step, "loss": 1.0}, validation=False
        )
        keeper.register_checkpoint(report)
    return folder


def mend(folder: Path) -> bool:
    return repair_checkpoint_list(str(folder))


def taken(folder: Path) -> tuple[str | None, list[str]]:
    """The checkpoint that Train would go on from, and all that it knows."""
    keeper = manager(folder)
    latest = keeper.latest_checkpoint_result
    names = [Path(result.checkpoint.path).name for result in keeper._checkpoint_results]
    return None if latest is None else Path(latest.checkpoint.path).name, names


def on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def warnings(caplog) -> list[str]:
    """Ours; Train tells that it has found a list."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("rayembed")]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


NAMES = [checkpoint_name(step) for step in (4, 8, 12)]


def test_whole_checkpoints_are_left_as_they_are(folder, caplog):
    before = (folder / LIST_FILE).read_text()
    assert mend(folder) is False
    assert (folder / LIST_FILE).read_text() == before
    assert taken(folder) == (NAMES[2], NAMES)
    assert listed_checkpoints(str(folder)) == NAMES
    assert not warnings(caplog)


def test_the_one_before_a_damaged_one_is_taken_with_a_warning(folder, caplog):
    cut(folder / NAMES[2] / "state-00000.safetensors")
    assert taken(folder)[0] == NAMES[2], "without mending it would be gone on from"
    assert mend(folder) is True
    assert taken(folder) == (NAMES[1], NAMES[:2])
    assert on_disk(folder) == NAMES[:2]
    first, second = warnings(caplog)
    assert f"checkpoint {NAMES[2]} is incomplete and is removed" in first
    assert "bytes" in first
    assert second == f"the stage resumes from {NAMES[1]}"
    assert mend(folder) is False


@pytest.mark.parametrize("name", ["state-00000.safetensors", "random-00000.safetensors", POSITION])
def test_a_missing_file_is_damage(folder, name):
    (folder / NAMES[2] / name).unlink()
    assert mend(folder) is True
    assert taken(folder)[0] == NAMES[1]


@pytest.mark.parametrize("name", ["state-00000.safetensors", POSITION])
def test_a_storage_that_does_not_answer_costs_no_checkpoint(folder, name):
    """A file that cannot be read for now (here: names that lead in a circle) may be whole."""
    file = folder / NAMES[2] / name
    kept = file.rename(folder.parent / "kept")
    file.symlink_to(file)
    before = (folder / LIST_FILE).read_text()
    with pytest.raises(StorageError, match=name):
        mend(folder)
    assert on_disk(folder) == NAMES
    assert (folder / LIST_FILE).read_text() == before
    file.unlink()
    kept.rename(file)
    assert mend(folder) is False
    assert taken(folder) == (NAMES[2], NAMES)


def test_an_older_damaged_one_does_not_send_the_stage_back(folder, caplog):
    cut(folder / NAMES[0] / "random-00000.safetensors")
    assert mend(folder) is True
    assert taken(folder) == (NAMES[2], NAMES[1:])
    assert "resumes from" not in caplog.text


def test_a_checkpoint_that_is_gone_stops_train_no_more(folder):
    shutil.rmtree(folder / NAMES[2])
    with pytest.raises(Exception, match="does not exist anymore"):
        manager(folder)
    assert mend(folder) is True
    assert taken(folder) == (NAMES[1], NAMES[:2])


def test_without_a_whole_one_the_stage_begins_anew(folder, caplog):
    for name in NAMES:
        (folder / name / POSITION).write_text("{")
    assert mend(folder) is True
    assert taken(folder) == (None, [])
    assert on_disk(folder) == []
    assert "the stage resumes from its beginning" in caplog.text


@pytest.mark.parametrize("text", ["", '{"ray_version": "2', "[]", '{"checkpoint_results": [{}]}'])
def test_a_list_that_is_cut_off_is_made_anew(folder, text, caplog):
    (folder / LIST_FILE).write_text(text)
    cut(folder / NAMES[2] / "state-00000.safetensors")
    assert mend(folder) is False
    assert taken(folder) == (NAMES[1], NAMES[:2])
    assert on_disk(folder) == NAMES[:2]
    assert "rebuilt from the complete checkpoints next to it" in caplog.text


def test_the_list_of_another_version_of_ray_is_made_anew(folder):
    listed = json.loads((folder / LIST_FILE).read_text())
    (folder / LIST_FILE).write_text(json.dumps({**listed, "ray_version": "2.1.0"}))
    mend(folder)
    assert json.loads((folder / LIST_FILE).read_text())["ray_version"] == ray.__version__
    assert taken(folder) == (NAMES[2], NAMES)


def test_a_whole_one_that_train_could_not_list_any_more_is_gone_on_from(folder, caplog):
    save(folder, 16)
    assert mend(folder) is False
    assert taken(folder) == (checkpoint_name(16), [*NAMES, checkpoint_name(16)])
    assert not warnings(caplog)


def test_a_part_that_was_never_listed_is_removed_without_a_word(folder, caplog):
    cut(save(folder, 16) / "state-00000.safetensors")
    assert mend(folder) is False
    assert on_disk(folder) == NAMES
    assert not warnings(caplog)


def test_a_stage_without_checkpoints_has_none(tmp_path):
    assert mend(tmp_path / "train") is False
    assert not (tmp_path / "train").exists()
    assert listed_checkpoints(str(tmp_path / "train")) == []


def test_files_of_two_attempts_are_no_checkpoint(tmp_path):
    """A worker that was killed left its file of a step that others then wrote again."""
    (tmp_path / "other").mkdir()
    here, other = save(tmp_path, 4), save(tmp_path / "other", 8)
    assert find_damage(str(here)) is None
    shutil.copy(other / "random-00000.safetensors", here)
    assert find_damage(str(here)) == "random-00000.safetensors belongs to another checkpoint"
    with pytest.raises(ArtifactError, match="is incomplete: random-00000"):
        Checkpoint(here, POSITIONS)


def test_object_storage_is_mended_in_the_same_way(folder, monkeypatch):
    cut(folder / NAMES[2] / "state-00000.safetensors")
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/stage/train"
        upload_folder(folder, place)
        assert repair_checkpoint_list(place) is True
        assert listed_checkpoints(place) == NAMES[:2]
        names = {path.partition("/")[0] for path in list_files(place, recursive=True)}
        assert names == {*NAMES[:2], LIST_FILE, ".validate_storage_marker"}
        assert repair_checkpoint_list(place) is False
