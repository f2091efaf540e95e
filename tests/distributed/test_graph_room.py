"""Workers with different tokens decide alike what they keep of a step's forward passes."""

import pytest
import torch
from run_distributed import run_distributed
from torch import nn
from toy_model import ToyModel
from train_made_up import made_up_batch, train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.contract import TrainableModel
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.memory import graph_room, stage_memory
from rayembed.training.memory.graph_room import GraphRoom, Tokens, bytes_to_come
from rayembed.training.memory.stage_memory import MemoryPlan, StageMemory
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 16, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.01},
        "steps": 1,
    },
)
WORLD, WIDTH, LAYERS = 2, 8, 2
GIVEN = torch.ones(64, WIDTH)
TOKENS = (1400, 1350)
"""Of the measured pass of each worker."""


class Layer(nn.Module):
    """Saves its input and what is in between, or its input alone where it is recomputed."""

    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        if self.gradient_checkpointing:
            return self._gradient_checkpointing_func(self.work, x)
        return self.work(x)

    def work(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Stack(TrainableModel):
    """Layers that know how to be recomputed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    @property
    def trained_parts(self):
        return [self]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def levels(least, most):
    """Numbers from the one to the other, each 1 % above the last."""
    found = [float(least)]
    while found[-1] < most:
        found.append(found[-1] * 1.01)
    return found


def passes_by_room(rank, world, lefts):
    """Forward passes of a step on this worker, for each number of bytes that are left."""
    model = ToyModel()
    passed = []
    model.register_forward_hook(lambda *_: passed.append(1))
    states = 12 * sum(p.numel() for p in model.parameters())
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        for left in lefts:
            patch.setattr(graph_room, "free_memory", lambda _, left=left: states + int(left))
            passed.clear()
            run_step(
                model,
                EngineModule(model),
                lambda loss, last: loss.backward(),
                made_up_batch(model, STAGE, 0),
                STAGE,
                StepSettings(60 + 30 * rank, GraphRoom(CPU, model), CPU),
            )
            found.append(len(passed))
    return found


def ways_by_room(rank, world, lefts):
    """Whether graphs are kept, layers that are recomputed, and collectives that the decision took
    on this worker, for each number of bytes that are left.
    """
    torch.manual_seed(0)
    model = Stack()
    given = torch.ones(TOKENS[rank], WIDTH)
    states = 12 * sum(p.numel() for p in model.parameters())
    tokens = Tokens(of_step=4 * max(TOKENS), of_pass=max(TOKENS))
    called = []

    def counted(value, device, largest=graph_room.largest):
        called.append(1)
        return largest(value, device)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setattr(graph_room, "largest", counted)
        for left in lefts:
            patch.setattr(graph_room, "free_memory", lambda _, left=left: states + int(left))
            called.clear()
            room = GraphRoom(CPU, model)
            kept = room.keeps_graphs(lambda: model(given), TOKENS[rank], tokens)
            recomputed = sum(layer.gradient_checkpointing for layer in model.layers)
            found.append((kept, recomputed, len(called)))
    return found


def tokens_of_passes(rank, world, folder, labels=("one kind", "another kind")):
    """Tokens of a pass of packed texts on a worker with more memory than the one before, at the
    first start and after the plan is gone on one of them; collectives of each start.
    """
    called, found = [], []

    def counted(value, device, largest=graph_room.largest):
        called.append(1)
        return largest(value, device)

    class Gpu:
        type = "cuda"

    model = ToyModel()
    with pytest.MonkeyPatch.context() as patch:
        for module in (graph_room, stage_memory):
            patch.setattr(module, "largest", lambda value, _: counted(value, CPU))
        patch.setattr(stage_memory, "packs", lambda _: True)
        patch.setattr(stage_memory, "device_label", lambda _: labels[rank])
        patch.setattr(stage_memory, "_probe", lambda *_: (lambda: Stack()(GIVEN), len(GIVEN)))
        patch.setattr(graph_room, "free_memory", lambda _: 4**rank * 2**26)
        for _ in range(2):
            called.clear()
            memory = StageMemory(STAGE, Placement(use_gpu=True), Gpu, str(folder / str(rank)))
            room = GraphRoom(torch.device("cuda"), model, to_come=lambda: 0)
            tokens = memory.settle(room, model, nn.Identity())
            found.append((tokens, len(called)))
            if rank == 1:
                MemoryPlan().write(str(folder / str(rank)))
    return found


def states_by_stage(rank, world):
    """Bytes of the optimiser's states that are counted before a step, and those that it has made;
    whether there were any before and after.
    """
    found = {}
    for zero in (0, 1, 2, 3):
        for dtype in ("float32", "bfloat16"):
            model = ToyModel().to(getattr(torch, dtype))
            placement = Placement(zero_stage=zero, workers=world)
            engine = DeepSpeedEngine(model, STAGE, placement, dtype, world)
            before = engine.has_states
            whole = bytes_to_come(model, placement, world, 12)
            counted = whole - bytes_to_come(model, placement, world, 12, states=False)
            train_made_up(engine, model, STAGE, StepSettings(10**6, False, CPU))
            states = engine._inner().state.values()
            made = [s[name].nbytes for s in states for name in ("exp_avg", "exp_avg_sq")]
            found[zero, dtype] = (counted, sum(made), before, engine.has_states)
    return found


def test_all_workers_make_as_many_passes_whatever_their_tokens():
    """Where the memory that is left lies at the threshold of GradCache, workers whose first passes
    have different tokens make the same number of passes: under ZeRO-3 another number is a hang.
    """
    first, second = run_distributed(passes_by_room, WORLD, levels(8e3, 2e4))
    assert first == second
    assert len(set(first)) == 2, "graphs are kept with much memory and not with little"


def test_all_workers_measure_and_recompute_alike_whatever_their_tokens():
    """A worker that alone found that the graphs do not fit would measure what they take with layers
    recomputed, and wait for the others in a collective that they do not call.
    """
    first, second = run_distributed(ways_by_room, WORLD, levels(5e5, 2e7))
    assert first == second
    ways = {way[:2] for way in first}
    # Of one pass's two layers one is there again in its turn, so that (False, 1) saves nothing.
    assert ways == {(True, 0), (True, 1), (True, 2), (False, 0), (False, 2)}
    counted = {calls for *_, calls in first}
    assert counted == {2, 3}, "of the room, whole graphs and bare ones"


def test_all_workers_take_the_tokens_that_the_one_with_the_least_memory_has_room_for(tmp_path):
    """Also where one of them does not see the plan yet, as on storage that is late."""
    first, second = run_distributed(tokens_of_passes, WORLD, tmp_path)
    assert first == second
    (tokens, measured), (again, read) = first
    assert 8192 < tokens == again < 131_072
    assert measured > read


def test_states_that_are_counted_are_those_that_a_step_makes():
    """DeepSpeed makes them with the first update, but those of whole bfloat16 weights at once."""
    for found in run_distributed(states_by_stage, WORLD):
        for (zero, dtype), (counted, made, before, after) in found.items():
            assert before == (zero == 0 and dtype == "bfloat16")
            assert after
            # Partitions are filled up to whole numbers of workers, those of a group together.
            assert made == pytest.approx(counted, abs=4 * 64), (zero, dtype)
