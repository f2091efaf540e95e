"""States that workers write to a checkpoint: each once, whole, and hardly anything is sent."""

import pytest
import torch
import torch.distributed as dist
from run_distributed import run_distributed
from toy_model import ToyModel
from train_made_up import train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.training.checkpoints.partitioned_states import _parts
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

WORLD = 3
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 12, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1},
        "steps": 2,
    },
)
KINDS = [(0, "float32"), (1, "bfloat16"), (2, "float32"), (2, "bfloat16"), (3, "float32")]


class Sent:
    """Elements of floats that collectives take while the block runs."""

    NAMES = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "broadcast")

    def __enter__(self):
        self.elements, self.calls, self._before = 0, 0, {}
        for name in self.NAMES:
            self._before[name] = getattr(dist, name)
            setattr(dist, name, self._counted(self._before[name]))
        return self

    def __exit__(self, *_):
        for name, before in self._before.items():
            setattr(dist, name, before)

    def _counted(self, function):
        def call(*args, **named):
            tensors = [t for t in (*args, *named.values()) if torch.is_tensor(t)]
            floats = [t.numel() for t in tensors if t.is_floating_point()]
            self.elements += max(floats, default=0)
            self.calls += bool(floats)
            return function(*args, **named)

        return call


def states(rank, world):
    found = {}
    for zero, dtype in KINDS:
        model = ToyModel(context=True).to(getattr(torch, dtype))
        engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), dtype, world)
        settings = StepSettings(60, True, torch.device("cpu"), pass_cost_tokens=1)
        train_made_up(engine, model, STAGE, settings)
        with Sent() as whole:
            everywhere = {
                name: {key: value.clone() for key, value in state.items()}
                for name, state in engine.optimizer_state()
            }
        with Sent() as sent:
            written = {
                name: {key: value.clone() for key, value in state.items()}
                for name, state in engine.written_states()
            }
        shared = None
        if zero in (1, 2):
            trained = [parameter for _, parameter in engine._trained()]
            owners = [sum(held > 0 for held in parts) for parts in _parts(trained)]
            shared = [p.numel() for p, o in zip(trained, owners, strict=True) if o > 1]
        found[zero, dtype] = written, everywhere, sent.elements, whole.elements, shared
    return found


@pytest.fixture(scope="module")
def of_workers():
    return run_distributed(states, WORLD)


@pytest.mark.parametrize("kind", KINDS)
def test_each_state_is_written_once_and_whole(of_workers, kind):
    everywhere = of_workers[0][kind][1]
    written = [of_worker[kind][0] for of_worker in of_workers]
    assert sorted(name for own in written for name in own) == sorted(everywhere)
    assert all(written), "each worker writes a part"
    for own in written:
        for name, state in own.items():
            assert state.keys() == everywhere[name].keys() > {"weight", "step", "exp_avg"}
            for key, value in state.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, everywhere[name][key]), (name, key)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] in (1, 2)])
def test_what_lies_in_one_partition_is_not_sent(of_workers, kind):
    """DeepSpeed's getters all-reduce three states of every parameter in fp32."""
    _, everywhere, sent, whole, shared = of_workers[0][kind]
    assert whole == 3 * sum(state["weight"].numel() for state in everywhere.values())
    assert shared, "some lie in two partitions"
    assert sent == 3 * sum(shared) < whole
