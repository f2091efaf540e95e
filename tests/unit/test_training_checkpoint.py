"""A checkpoint is read by the run, the stage and the plan that it was made of, and by no other."""

import pytest
import torch

from rayembed.errors import ArtifactError
from rayembed.training.checkpoint import Checkpoint, expected_position, save_checkpoint


class Engine:
    def __init__(self, value: float) -> None:
        self.state = {"weight": torch.full((3,), value), "exp_avg": torch.full((3,), value / 2)}
        self.restored: dict[str, dict[str, torch.Tensor]] = {}

    def optimizer_state(self):
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
        with pytest.raises(ArtifactError, match=name):
            Checkpoint(tmp_path, other)
