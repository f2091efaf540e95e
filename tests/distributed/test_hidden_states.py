"""Hidden states of a teacher in the step, by DeepSpeed: workers, ZeRO stage, GradCache, resume."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from run_distributed import run_distributed
from tiny_folders import save_tiny, tiny_settings
from train_made_up import KeepFirst, distance, train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.contract import load_trainable_state
from rayembed.models.loading.build import build_model
from rayembed.training.checkpoints.checkpoint import Checkpoint, expected_position, seed_worker
from rayembed.training.contrastive import hidden_states
from rayembed.training.contrastive.hidden_states import StateErrors
from rayembed.training.contrastive.step import CONTRASTIVE
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

PAIRS = 8
KINDS = ("biencoder", "nomic-moe")


def stage(folder):
    return parse(
        StageConfig,
        {
            "name": "s",
            "datasets": {"d": 1},
            "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
            "loss": {"temperature": 0.1},
            "hidden_states": {"teacher": str(folder), "weight": 0.5},
            "optimizer": {"learning_rate": 0.01, "gradient_clipping": 0.5, "eps": 1e-5},
            "steps": 4,
            "checkpoint_every_steps": 2,
        },
    )


def train(rank, world, kind, start, teacher, zero, *, cache=True, save=None, resume=None):
    """Weights after the stage, and the error of each step."""
    config = tiny_settings(kind)
    model = build_model(config, dict.fromkeys(config.parts, start), seed=3)
    checkpoint = None
    if resume is not None:
        checkpoint = Checkpoint(resume, expected_position("s", "run", "plan"))
        load_trainable_state(model, checkpoint.weights())
    seed_worker(5, 0)
    own = stage(teacher)
    states = StateErrors(model, CONTRASTIVE.teacher(model, own, "float32"))
    engine = DeepSpeedEngine(model, own, Placement(zero_stage=zero), "float32", world, (), states)
    if checkpoint is not None:
        checkpoint.restore(engine)
    errors = []
    weights = train_made_up(
        engine,
        model,
        own,
        # Micro-batches of other sizes on each worker, so that some are fillers.
        StepSettings(60 + 30 * rank, cache, torch.device("cpu"), pass_cost_tokens=1),
        start=0 if checkpoint is None else 2,
        callbacks=[KeepFirst(save)],
        on_step=lambda record: errors.append(record["hidden_states/error"]),
    )
    return weights, errors


def cases(rank, world, starts, teachers, folder):
    found = {}
    for kind in KINDS:
        given = starts[kind], teachers[kind]
        for zero in (0, 1, 2, 3):
            found[kind, zero] = train(rank, world, kind, *given, zero)
            dist.barrier()
        found[kind, "graphs"] = train(rank, world, kind, *given, 3, cache=False)
    given = KINDS[0], starts[KINDS[0]], teachers[KINDS[0]]
    place = Path(folder) / str(world)
    train(rank, world, *given, 3, save=place)
    found["resumed"] = train(rank, world, *given, 3, resume=place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_states, "_counts", without_occurrences)
        found["control"] = train(rank, world, *given, 2)
    return found


def without_occurrences(batch):
    return batch["attention_mask"].float().flatten()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("states")
    starts = {kind: save_tiny(kind, home / f"start-{kind}", seed=1) for kind in KINDS}
    teachers = {kind: save_tiny(kind, home / f"teacher-{kind}", seed=5) for kind in KINDS}
    given = starts, teachers, home
    return {world: run_distributed(cases, world, *given) for world in (1, 2)}


def test_weights_do_not_depend_on_workers_zero_stage_or_cache(runs):
    for kind in KINDS:
        weights, errors = runs[1][0][kind, 0]
        assert errors[0] > 0.1
        assert errors[-1] < errors[0], "it is learnt"
        for workers in runs.values():
            for found in workers:
                for key in [key for key in found if key[0] == kind]:
                    # Sums in another order, four steps of 0.01 of Adam.
                    assert distance(found[key][0], weights) < 1e-4, key
                    assert found[key][1] == pytest.approx(errors, rel=1e-4), key


def test_a_resumed_stage_ends_with_the_weights_of_an_uninterrupted_one(runs):
    for workers in runs.values():
        for found in workers:
            assert distance(found["resumed"][0], found[KINDS[0], 3][0]) == 0
            assert found["resumed"][1] == found[KINDS[0], 3][1][2:]


def test_the_control_counts_every_text_once(runs):
    for workers in runs.values():
        assert distance(workers[0]["control"][0], runs[1][0][KINDS[0], 2][0]) > 1e-3
