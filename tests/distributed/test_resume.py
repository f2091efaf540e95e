"""NV-Embed with LoRA and dropout: resumed weights, reloaded weights, for each ZeRO stage."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from run_distributed import run_distributed
from tiny_models import save_decoder
from train_made_up import train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.errors import ArtifactError
from rayembed.models.contract import load_trainable_state
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode
from rayembed.training import engine as engine_module
from rayembed.training.callbacks import KeepCheckpoints, whole_weights
from rayembed.training.checkpoints import checkpoint as checkpoint_module
from rayembed.training.checkpoints.checkpoint import (
    POSITION,
    Checkpoint,
    expected_position,
    seed_worker,
)
from rayembed.training.checkpoints.checkpoint_list import checkpoint_name
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.memory.graph_room import GraphRoom
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

STEPS, PAIRS = 4, 8
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
        "steps": STEPS,
        "checkpoint_every_steps": 2,
    },
)


OTHER_PATHS = {
    **{(zero, "one graph"): {"grad_cache": False} for zero in (0, 1, 2, 3)},
    **{(zero, "graphs that fit"): {"grad_cache": "auto"} for zero in (0, 1, 2, 3)},
    (2, "recomputed"): {"recompute": True},
    (2, "a layer recomputed"): {"grad_cache": "auto", "recompute": "auto"},
    (3, "a layer recomputed"): {"grad_cache": "auto", "recompute": "auto", "partitioned": True},
    (2, "one graph, recomputed"): {"grad_cache": False, "recompute": True},
    (3, "partitioned"): {"partitioned": True},
    (3, "partitioned, recomputed"): {"partitioned": True, "recompute": True},
}
"""To the gradients of GradCache, with the same dropout drawn in each pass, by ZeRO stage."""


class RoomForALayer(GraphRoom):
    """Room for the graph of one of two layers."""

    def _fits(self, way, *given):
        super()._fits(way, *given)
        return way.recomputed == 1


def config(dtype="float32"):
    return parse(
        NVEmbedConfig,
        {
            "backbone": {"path": "given", "dtype": dtype},
            "pooling": {
                "kind": "latent_attention",
                "num_latents": 4,
                "num_heads": 2,
                "head_dim": 8,
            },
            "lora": {"rank": 2, "alpha": 4, "dropout": 0.3},
            "query_max_length": 32,
            "document_max_length": 32,
        },
    )


def run(
    rank,
    world,
    backbone,
    zero,
    folder,
    *,
    resume_at=None,
    dtype="float32",
    dropout_replayed=True,
    grad_cache=True,
    recompute=False,
    partitioned=False,
    handed_in=None,
):
    """Trainable weights after all steps, from the start or from a checkpoint in `folder`.

    `handed_in` gets the weights after each step, as they are left to be scored.
    """
    model = build_model(config(dtype), backbone, seed=3)
    if recompute is True:
        model.recompute_layers()
    position = expected_position("s", "run", "plan")
    checkpoint = None
    if resume_at is not None:
        checkpoint = Checkpoint(folder / checkpoint_name(resume_at), position)
        load_trainable_state(model, checkpoint.weights())
    seed_worker(5, 0)
    settings = engine_module.deepspeed_settings
    with pytest.MonkeyPatch.context() as patch:
        if partitioned:  # all but the largest of this small model's parameters stay whole otherwise
            patch.setattr(engine_module, "deepspeed_settings", without_whole_parameters(settings))
        engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), dtype, world)
    assert not partitioned or not any(p.ds_persist for p in model.parameters())
    start = 0
    if checkpoint is not None:
        if not dropout_replayed:
            checkpoint_module.restore = lambda state: None  # GradCache keeps its own
        checkpoint.restore(engine)
        start = checkpoint.position.step
        assert start == resume_at

    def ends_after(step):
        if handed_in is not None:
            handed_in[step] = whole_weights(engine)
        return False

    if grad_cache == "auto":
        room = RoomForALayer if recompute == "auto" else GraphRoom
        grad_cache = room(torch.device("cpu"), model, recompute=recompute)
    settings = StepSettings(60 + 30 * rank, grad_cache, torch.device("cpu"))
    weights = train_made_up(
        engine,
        model,
        STAGE,
        settings,
        start=start,
        callbacks=[KeepCheckpoints(folder)] if resume_at is None else [],
        ends_after=ends_after,
    )
    return weights, model


def without_whole_parameters(settings):
    def changed(*arguments):
        values = settings(*arguments)
        values["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return values

    return changed


def cases(rank, world, backbone, folder):
    found = {}
    for zero in (0, 1, 2, 3):
        for dtype in ("float32", "bfloat16"):
            here, handed_in = folder / f"{zero}{dtype}", {}
            found[zero, dtype, "whole"], _ = run(
                rank, world, backbone, zero, here, dtype=dtype, handed_in=handed_in
            )
            if rank == 0:
                found[zero, dtype, "handed in"] = handed_in[STEPS]
                found[zero, dtype, "handed in before"] = handed_in[2]
            found[zero, dtype, "resumed"], _ = run(
                rank, world, backbone, zero, here, resume_at=2, dtype=dtype
            )
    for (zero, name), options in OTHER_PATHS.items():
        here = folder / f"{zero}{name}"
        found[zero, name], _ = run(rank, world, backbone, zero, here, **options)
    found["control"], _ = run(
        rank, world, backbone, 2, folder / "2float32", resume_at=2, dropout_replayed=False
    )
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    backbone = Path(save_decoder(folder / "backbone"))
    found = run_distributed(cases, 2, backbone, folder / "runs")
    shutil.copytree(folder / "runs" / "2bfloat16" / checkpoint_name(2), folder / "step2")
    shutil.rmtree(folder / "runs")
    return backbone, found, folder / "step2"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_weights_are_those_of_the_uninterrupted_run(trained, zero, dtype):
    found = trained[1][0]
    whole, resumed = found[zero, dtype, "whole"], found[zero, dtype, "resumed"]
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_left_to_be_scored_are_those_of_their_step(trained, zero, dtype):
    """And taking them changes nothing: the resumed run, which takes none, ends the same."""
    found = trained[1][0]
    for name, weight in found[zero, dtype, "whole"].items():
        assert torch.equal(found[zero, dtype, "handed in"][name], weight), name
    before = found[zero, dtype, "handed in before"]
    assert any(not torch.equal(before[name], found[zero, dtype, "whole"][name]) for name in before)


def test_without_the_random_state_the_resumed_weights_differ(trained):
    found = trained[1][0]
    whole, control = found[2, "float32", "whole"], found["control"]
    assert any(not torch.equal(whole[name], control[name]) for name in whole)


def test_all_workers_hold_the_same_weights(trained):
    first, second = trained[1]
    for key in second:  # worker 0 alone hands in weights
        for name in first[key]:
            assert torch.equal(first[key][name], second[key][name]), (key, name)


def test_zero_stages_agree_in_fp32(trained):
    found = trained[1][0]
    for zero in (1, 2, 3):
        for name, expected in found[0, "float32", "whole"].items():
            # Sums over workers and micro-batches in another order; Adam magnifies rounding.
            torch.testing.assert_close(
                found[zero, "float32", "whole"][name], expected, atol=2e-5, rtol=1e-4
            )


@pytest.mark.parametrize(("zero", "path"), OTHER_PATHS)
def test_grad_cache_equals_other_paths_with_dropout_and_lora(trained, zero, path):
    found = trained[1][0]
    for name, expected in found[zero, "float32", "whole"].items():
        # Adam magnifies rounding; other dropout moves weights by 1e-2 (the control above).
        torch.testing.assert_close(found[zero, path][name], expected, atol=2e-5, rtol=1e-4)


def test_lora_of_zero_3_is_saved_and_reloads_to_the_same_vectors(trained, tmp_path):
    backbone, found, _ = trained
    state = found[0][3, "float32", "whole"]
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in state.items())
    texts = ["are cats larger than dogs", "Paris is the capital of France"]
    model = build_model(config(), backbone, seed=3).eval()
    untrained = encode(model, texts, role="query", instruction="find")
    load_trainable_state(model, state)
    expected = encode(model, texts, role="query", instruction="find")
    assert np.abs(expected - untrained).max() > 1e-2
    model.save(tmp_path / "model")
    reloaded = encode(load_model(tmp_path / "model"), texts, role="query", instruction="find")
    np.testing.assert_allclose(reloaded, expected, atol=1e-5)


def test_checkpoints_of_others_and_incomplete_ones_are_refused(trained, tmp_path):
    saved = trained[2]
    assert Checkpoint(saved, expected_position("s", "run", "plan")).position.step == 2
    for place, what in enumerate(("stage", "run_fingerprint", "plan_fingerprint")):
        asked = ["s", "run", "plan"]
        seen = f"{what} {asked[place]!r}, but this run has 'x'"
        asked[place] = "x"
        with pytest.raises(ArtifactError, match=seen):
            Checkpoint(saved, expected_position(*asked))
    for name in ("state-00001.safetensors", "random-00001.safetensors", POSITION):
        broken = Path(shutil.copytree(saved, tmp_path / name))
        (broken / name).unlink()
        with pytest.raises(ArtifactError, match=name):
            Checkpoint(broken, expected_position("s", "run", "plan"))
    (broken / POSITION).write_text((saved / POSITION).read_text())
    state = broken / "state-00000.safetensors"
    state.write_bytes(state.read_bytes()[:-5])
    with pytest.raises(ArtifactError, match="incomplete"):
        Checkpoint(broken, expected_position("s", "run", "plan"))
