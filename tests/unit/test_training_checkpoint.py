"""A checkpoint is read by the run, the stage and the plan that it was made of, and by no other."""

import errno
import json
import os

import pytest
import torch

from rayembed.errors import ArtifactError, StorageFullError
from rayembed.training.checkpoints import checkpoint
from rayembed.training.checkpoints.checkpoint import (
    Checkpoint,
    expected_position,
    find_damage,
    save_checkpoint,
)
from rayembed.training.checkpoints.weights import check_made_of, write_weights


class Engine:
    def __init__(self, value: float) -> None:
        self.state = {"weight": torch.full((3,), value), "exp_avg": torch.full((3,), value / 2)}
        self.restored: dict[str, dict[str, torch.Tensor]] = {}

    def written_states(self):
        yield "layer", self.state

    def restore_optimizer_state(self, saved):
        self.restored = {name: dict(state) for name, state in saved.items()}


def test_a_checkpoint_of_another_run_stage_or_plan_is_refused(tmp_path):
    ours = expected_position("s", "run", "plan")
    save_checkpoint(tmp_path, Engine(4.0), ours.at(6))
    taken, engine = Checkpoint(tmp_path, ours), Engine(0.0)
    taken.restore(engine)
    assert taken.position.step == 6
    assert engine.restored["layer"].keys() == {"weight", "exp_avg"}
    assert torch.equal(engine.restored["layer"]["weight"], torch.full((3,), 4.0))
    assert torch.equal(engine.restored["layer"]["exp_avg"], torch.full((3,), 2.0))
    for name, other in (
        ("stage", expected_position("x", "run", "plan")),
        ("run_fingerprint", expected_position("s", "x", "plan")),
        ("plan_fingerprint", expected_position("s", "run", "x")),
    ):
        with pytest.raises(ArtifactError, match=name) as refused:
            Checkpoint(tmp_path, other)
        assert ("settings and data" in str(refused.value)) == (name == "plan_fingerprint")


def test_weights_of_another_plan_are_refused(tmp_path):
    path = str(tmp_path / "weights.safetensors")
    write_weights(path, {"a": torch.eye(2)}, {"run": "this", "plan": "old"})
    check_made_of(path, {"run": "this", "plan": "old"})
    with pytest.raises(ArtifactError, match=r"'plan': 'new'.*settings, data or the previous stage"):
        check_made_of(path, {"run": "this", "plan": "new"})


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    def fills_up(*_arguments, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", fills_up)
    ours = expected_position("s", "run", "plan").at(6)
    with pytest.raises(StorageFullError, match=rf"'{tmp_path}'.*bytes are free .* or set TMPDIR"):
        save_checkpoint(tmp_path, Engine(4.0), ours)


@pytest.mark.parametrize("name", ["state-00000.safetensors", "random-00000.safetensors"])
def test_a_flipped_bit_is_not_trained_on(tmp_path, name):
    ours = expected_position("s", "run", "plan")
    save_checkpoint(tmp_path, Engine(4.0), ours.at(6))
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 4
    path.write_bytes(content)
    assert find_damage(str(tmp_path)) is None  # its header and length are as they were
    with pytest.raises(ArtifactError, match=rf"is damaged: .* in {name} has changed since"):
        Checkpoint(tmp_path, ours).restore(Engine(0.0))
    content[-2] ^= 4
    path.write_bytes(content)
    Checkpoint(tmp_path, ours).restore(Engine(0.0))


def test_weights_are_compared_as_they_are_read(tmp_path):
    ours = expected_position("s", "run", "plan")
    save_checkpoint(tmp_path, Engine(4.0), ours.at(6))
    path = tmp_path / "state-00000.safetensors"
    (size,) = (int.from_bytes(path.read_bytes()[:8], "little"),)
    header = json.loads(path.read_bytes()[8 : 8 + size])
    first, _ = header["layer|weight"]["data_offsets"]
    content = bytearray(path.read_bytes())
    content[8 + size + first] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"'layer\|weight' in state-00000"):
        dict(Checkpoint(tmp_path, ours).weights())
