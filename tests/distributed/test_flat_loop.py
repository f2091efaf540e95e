"""docs/flat_loop.py, which a reader takes the platform's step for: it gives the same weights."""

import copy
import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from made_up_records import made_up_records
from run_distributed import run_distributed
from tiny_models import save_encoder
from train_made_up import distance
from transformers import AutoTokenizer

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.training.checkpoints.checkpoint import seed_worker
from rayembed.training.contrastive.step import CONTRASTIVE
from rayembed.training.trainer import Callback, StageTrainer

pytestmark = pytest.mark.distributed

FLAT_LOOP = Path(__file__).resolve().parents[2] / "docs" / "flat_loop.py"
STEPS, PAIRS, NEGATIVES, TOKENS, SEED = 4, 16, 2, 100, 5
EPS = 1e-5
"""Of AdamW: with its own 1e-8 a gradient that is rounding, of other kernels another, moves a weight
as far as any."""
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {
            "global_pairs": PAIRS,
            "num_negatives": NEGATIVES,
            "in_batch_negatives": True,
        },
        "loss": {"temperature": 0.1},
        "optimizer": {
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "warmup_steps": 1,
            "gradient_clipping": 0.5,
            "eps": EPS,
        },
        "steps": STEPS,
    },
)


def config(dropout):
    backbone = {"path": "given", "dtype": "float32", "hidden_dropout": dropout}
    lengths = {"query_max_length": 12, "document_max_length": 12}
    return parse(BiEncoderConfig, {"backbone": backbone, **lengths})


@dataclass(frozen=True)
class Plan:
    """As a batch plan: repeated texts, classes, short lists, rows without in-batch negatives."""

    fingerprint: str = "made up"
    num_negatives: int = NEGATIVES
    teachers: tuple[str, ...] = ()

    def read(self, step, worker=0, num_workers=1, columns=()):
        share = PAIRS // num_workers
        return made_up_records(PAIRS, seed=step)[worker * share : (worker + 1) * share]


class Losses(Callback):
    """The losses and micro-batches of all steps."""

    def __init__(self):
        self.losses, self.micro_batches, self.padding = [], set(), set()

    def on_step_end(self, record):
        self.losses.append(record["loss"])
        self.micro_batches.add(record["micro_batches"])
        self.padding.add(record["padding_share"])


def of_platform(model, world, unpadded="auto"):
    seen = Losses()
    placement = Placement(
        workers=world,
        zero_stage=0,
        micro_batch_tokens=TOKENS,
        grad_cache=True,
        unpadded=unpadded,
    )
    trainer = StageTrainer(
        STAGE, placement, model, CONTRASTIVE, Plan(), seed=SEED, callbacks=[seen]
    )
    engine = trainer.fit()
    assert (max(seen.padding) == 0) is (unpadded == "always")
    assert min(seen.micro_batches) > 1, "otherwise there was no cache"
    prefix = "backbone."
    return {
        name.removeprefix(prefix): weight.clone() for name, weight in engine.trainable_weights()
    }, seen.losses


def flat_loop():
    spec = importlib.util.spec_from_file_location("flat_loop", FLAT_LOOP)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def of_flat_loop(encoder, folder, *, temperature=0.1, masked=True):
    flat = flat_loop()
    if not masked:
        mask_of = flat.candidate_mask
        flat.candidate_mask = lambda *given: torch.ones_like(mask_of(*given))

    def rows(step):
        return [
            flat.Row(
                query=r.query,
                positive=r.positives[0],
                negatives=[negative.text for negative in r.negatives],
                answers=list(r.positives[1:]),
                label=r.label,
                in_batch=r.in_batch,
            )
            for r in Plan().read(step)
        ]

    settings = flat.Settings(
        steps=STEPS,
        num_negatives=NEGATIVES,
        temperature=temperature,
        learning_rate=0.01,
        weight_decay=0.1,
        warmup_steps=1,
        gradient_clipping=0.5,
        max_length=12,
        micro_batch_tokens=TOKENS,
    )
    seed_worker(SEED, 0)
    with patch.object(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=EPS)):
        losses = flat.train(encoder, AutoTokenizer.from_pretrained(folder), rows, settings)
    learnt = {name: p.detach() for name, p in encoder.named_parameters() if p.requires_grad}
    return learnt, losses


def cases(rank, world, folder):
    # Workers with fewer micro-batches than others draw dropout for what the platform fills up with.
    model = build_model(config(0.1 if world == 1 else 0.0), folder, seed=3)
    start = {name: p.detach().clone() for name, p in model.backbone.named_parameters()}
    # The encoder as transformers gives it, with the platform's attention.
    encoders = [copy.deepcopy(model.backbone) for _ in range(3)]
    packed = copy.deepcopy(model)
    return {
        "start": start,
        "platform": of_platform(model, world),
        # Attention without padding has no dropout.
        "packed": None if world == 1 else of_platform(packed, world, "always"),
        "flat": of_flat_loop(encoders[0], folder),
        "another temperature": of_flat_loop(encoders[1], folder, temperature=0.11),
        "no mask": of_flat_loop(encoders[2], folder, masked=False),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_encoder(tmp_path_factory.mktemp("flat") / "bert"))


def test_the_flat_loop_is_short_and_knows_no_room_that_it_explains():
    text = FLAT_LOOP.read_text()
    assert len(text.splitlines()) <= 250
    assert "import rayembed" not in text
    assert "from rayembed" not in text


def test_its_weights_are_the_platforms_bit_for_bit(folder):
    (found,) = run_distributed(cases, 1, folder)
    weights, losses = found["platform"]
    flat, flat_losses = found["flat"]
    assert flat_losses == losses
    assert distance(flat, weights) == 0.0
    assert all(not torch.equal(found["start"][name], weights[name]) for name in weights)
    for control in ("another temperature", "no mask"):
        other, other_losses = found[control]
        assert other_losses[0] != losses[0], control
        assert distance(other, weights) > 1e-3, control


def test_its_gather_and_its_masks_are_right_for_two_workers(folder):
    for found in run_distributed(cases, 2, folder):
        # Sums over workers in another order; Adam divides by the root of small squares.
        assert distance(found["flat"][0], found["platform"][0]) < 2e-5
        # A bias of the keys moves all scores of a query alike: its gradient is rounding, which Adam
        # divides by itself.
        flat, packed = (
            {name: weight for name, weight in found[way][0].items() if "key.bias" not in name}
            for way in ("flat", "packed")
        )
        assert distance(flat, packed) < 2e-5
        assert found["packed"][1] == pytest.approx(found["platform"][1], rel=1e-6)
