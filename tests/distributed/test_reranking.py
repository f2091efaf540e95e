"""Lists of a cross-encoder: two workers, ZeRO, GradCache and a resumed run train one worker's
weights.
"""

from functools import partial

import pytest
import torch.distributed as dist
from made_up_records import made_up_records
from run_distributed import run_distributed
from tiny_scorers import save_scorer
from train_made_up import distance, train_or_resume

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.loading.build import build_model
from rayembed_extras.reranking.objective import Lists, make_list_batch
from rayembed_extras.reranking.settings import CrossEncoderConfig

pytestmark = pytest.mark.distributed

STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 8, "num_negatives": 3, "in_batch_negatives": False},
        "loss": {"kind": "listwise_softmax"},
        # Adam would magnify the rounding of small gradients.
        "optimizer": {"learning_rate": 0.01, "eps": 1e-4, "gradient_clipping": 0.5},
        "steps": 4,
        "checkpoint_every_steps": 2,
    },
)
TOLERANCE = 2e-5
"""Sums over workers and micro-batches in another order; the weights move by more than 5e-3."""

WAYS = {
    "graphs kept": {"zero": 2, "cache": False},
    "GradCache": {"zero": 2, "cache": True},
    "GradCache, zero 3": {"zero": 3, "cache": True},
}


class MadeUpLists(Lists):
    """Lists of the records of seed s in step s, of which each worker takes an equal share."""

    def batches(self, plan, model, stage, seed):
        return partial(batch, model, stage)

    def source(self, plan, step):
        return str(step)


def batch(model, stage, step):
    share = stage.batch.global_pairs // dist.get_world_size()
    own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    records = made_up_records(stage.batch.global_pairs, num_negatives=3, seed=step)[own]
    return make_list_batch(step, records, stage.batch.num_negatives, model.tokenizer)


def config(folder):
    backbone = {"path": str(folder), "dtype": "float32"}
    return parse(CrossEncoderConfig, {"backbone": backbone, "document_max_length": 40})


def trained(rank, world, folder, saved):
    run = partial(train_or_resume, config(folder), folder, STAGE, objective=MadeUpLists())
    if world == 1:
        return {"alone": run(0, cache=False)}
    found = {name: run(**way) for name, way in WAYS.items()}
    run(2, cache=True, save=saved)
    found["resumed"] = run(2, cache=True, resume=saved)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The model's folder, and the weights of each worker by the number of workers."""
    home = tmp_path_factory.mktemp("reranking")
    folder = save_scorer(home / "scorer")
    given = (folder, home / "checkpoint")
    return folder, {world: run_distributed(trained, world, *given) for world in (1, 2)}


def test_two_workers_and_a_resumed_run_train_the_weights_of_one(results):
    folder, weights = results
    expected = weights[1][0]["alone"]
    for worker in weights[2]:
        for way in (*WAYS, "resumed"):
            assert distance(worker[way], expected) < TOLERANCE, way
    model = build_model(config(folder), folder, seed=3)
    start = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    assert distance(start, expected) > 5e-3, "the control: training moves the weights"
