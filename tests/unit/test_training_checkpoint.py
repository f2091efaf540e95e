"""A checkpoint of another run of the same plan, which a population's member goes on from."""

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


def test_only_whoever_asks_for_another_runs_checkpoint_gets_it(tmp_path):
    save_checkpoint(tmp_path, Engine(4.0), expected_position("s", "theirs", "plan").at(6))
    ours = expected_position("s", "ours", "plan")
    with pytest.raises(ArtifactError, match="run_fingerprint"):
        Checkpoint(tmp_path, ours)
    taken, engine = Checkpoint(tmp_path, ours, from_other_run=True), Engine(0.0)
    taken.restore(engine)
    assert taken.position.step == 6
    assert engine.restored["layer"].keys() == {"weight", "exp_avg"}
    assert torch.equal(engine.restored["layer"]["weight"], torch.full((3,), 4.0))
    assert torch.equal(engine.restored["layer"]["exp_avg"], torch.full((3,), 2.0))
    for other in (expected_position("x", "ours", "plan"), expected_position("s", "ours", "x")):
        with pytest.raises(ArtifactError):
            Checkpoint(tmp_path, other, from_other_run=True)
