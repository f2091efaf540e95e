"""Causal2Vec with two trained parts under DeepSpeed: against a plain loop, and resumed.

LoRA on the LLM and on the encoder, cross-attention and MLP in full; workers, ZeRO stages and
GradCache change nothing.
"""

from pathlib import Path

import pytest
from made_up_records import made_up_records
from plain_reference import train_by_hand
from run_distributed import run_distributed
from tiny_models import save_decoder, save_encoder
from train_made_up import distance, train_or_resume

from rayembed.config.settings import changed, parse
from rayembed.config.stage import StageConfig
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.loading.build import build_model

pytestmark = pytest.mark.distributed

STEPS, PAIRS, SAVED_AT = 3, 8, 1
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {
            "learning_rate": 0.01,
            "pooling_learning_rate": 0.02,
            "weight_decay": 0.1,
            "decay_steps": 2 * STEPS,
            "gradient_clipping": 0.5,
            # LoRA's A has no gradient but rounding while B is zero, and that of the head is small;
            # Adam would magnify rounding.
            "eps": 1e-4,
        },
        "steps": STEPS,
        "checkpoint_every_steps": SAVED_AT,
    },
)
LORA = {"rank": 2, "alpha": 4, "dropout": 0.0}
MODEL = parse(
    Causal2VecConfig,
    {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {
            "path": "given",
            "frozen": False,
            "lora": {**LORA, "target_modules": ["query", "value", "dense"]},
            "max_length": 32,
        },
        "num_contextual_tokens": 2,
        "lora": LORA,
        "query_max_length": 32,
        "document_max_length": 32,
    },
)

FROZEN = changed(
    MODEL,
    encoder=changed(MODEL.encoder, frozen=True, lora=None),
    num_contextual_tokens=1,
)
"""As the paper's 7B models: the mean of an encoder that is not trained."""

WAYS = {
    1: [(0, "one graph"), (2, "cache")],
    2: [(2, "cache"), (3, "one graph")],
}
"""Of each number of workers: the ZeRO stages, and with the cache or all in one graph. Others are
compared with one plain run in `test_drawn_trainings.py`."""


def trained_ways(rank, world, folders, saved):
    found = {}
    for zero, way in WAYS[world]:
        save = saved if world == 1 and way == "cache" else None
        found[zero, way] = train_or_resume(
            MODEL, folders, STAGE, zero, cache=way == "cache", save=save
        )
    if world == 2:
        found["frozen"] = train_or_resume(FROZEN, folders, STAGE, 3, cache=True)
        found["resumed"] = train_or_resume(MODEL, folders, STAGE, 3, resume=saved)
        found["control"] = train_or_resume(
            MODEL, folders, STAGE, 2, resume=saved, forget_moments=True
        )
    return found


TOLERANCE = 2e-5
"""Sums over workers and micro-batches in another order; the weights move by 2e-2 to 5e-2."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal2vec")
    folders = {
        "backbone": Path(save_decoder(folder / "backbone")),
        "encoder": Path(save_encoder(folder / "encoder")),
    }
    found = {w: run_distributed(trained_ways, w, folders, folder / "saved") for w in WAYS}
    return folders, found


def by_hand(config, folders, parts):
    """Weights of AdamW by hand over the loss of a loop over texts, of which all parts moved."""
    model = build_model(config, folders, seed=3).train()
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    weights, _ = train_by_hand(model, STAGE, lambda step: made_up_records(PAIRS, seed=step))
    for part in parts:
        own = [n for n in start if n.startswith(part)]
        moved = max((start[n] - weights[n]).abs().max().item() for n in own)
        assert moved > 5e-3, part
    return weights


@pytest.fixture(scope="module")
def expected(trained):
    parts = ("backbone.", "encoder.", "contextual.reader.", "contextual.projector.")
    return by_hand(MODEL, trained[0], parts)


def test_a_frozen_encoder_is_left_and_all_else_trained_alike(trained):
    expected = by_hand(FROZEN, trained[0], ("backbone.", "contextual.projector."))
    assert not any(name.startswith("encoder.") for name in expected)
    for worker in trained[1][2]:
        assert worker["frozen"].keys() == expected.keys()
        assert distance(worker["frozen"], expected) < TOLERANCE


@pytest.mark.parametrize("world", WAYS)
def test_weights_are_those_of_the_plain_loop_however_they_are_trained(trained, expected, world):
    for worker in trained[1][world]:
        control = worker.pop("control", None)
        cases = {case: weights for case, weights in worker.items() if case != "frozen"}
        assert len(cases) == len(WAYS[world]) + (world == 2)
        for case, weights in cases.items():
            assert distance(weights, expected) < TOLERANCE, case
        if world == 2:
            assert distance(control, expected) > 1e-3
