"""`rayembed.train` with several workers: on Ray, with the weights of the job's settings."""

import pytest
import safetensors.torch
from own_pairs import UNGUARDED, write_pairs
from tiny_models import save_encoder

import rayembed
from rayembed.pipeline.run.train import train

pytestmark = pytest.mark.ray

FAST = {
    "model.query_max_length": 32,
    "model.document_max_length": 32,
    "model.backbone.dtype": "float32",
    **UNGUARDED,
    "evaluation.before_training": False,
    "evaluation.baselines": [],
}


def weights(folder):
    return safetensors.torch.load_file(f"{folder}/model.safetensors")


def test_two_workers_train_on_ray_as_the_job_does(cluster, tmp_path):
    encoder = save_encoder(tmp_path / "encoder")
    write_pairs(tmp_path / "pairs.jsonl")
    given = {"steps": 4, "batch_size": 8, "learning_rate": 0.01, "settings": FAST}
    trained = rayembed.train(
        encoder, tmp_path / "pairs.jsonl", output=tmp_path / "out", workers=2, **given
    )
    assert trained.run.placement.workers == 2
    assert trained.run.placement.needs_ray
    # The same settings by the job's own road, into another storage, by one worker here.
    placement = {"workers": 1, "runtime": "local", "storage_path": str(tmp_path / "job")}
    run = trained.run.model_copy(
        update={"placement": trained.run.placement.model_copy(update=placement)}
    )
    alone = weights(train(run).model_folder)
    found, start = weights(trained.folder), weights(encoder)
    assert found.keys() == alone.keys()
    for name, weight in alone.items():
        # A bias of keys shifts all products of a query alike and has no gradient but rounding,
        # which Adam makes as large as any.
        if not name.endswith("key.bias"):
            assert (found[name] - weight).abs().max() < 1e-3, name
    moved = [name for name in found if name in start and not found[name].equal(start[name])]
    assert max(float((found[name] - start[name]).abs().max()) for name in moved) > 0.02
    assert trained.scores.keys() == {"stage 1: finetune"}
