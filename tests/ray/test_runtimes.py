"""One worker here and one on Ray are the same training, and each goes on from the other."""

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from own_pairs import own_run

from rayembed.pipeline.run.train import train
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog

pytestmark = pytest.mark.ray

EVERY, STEPS = 3, 6
EPS = "stages.finetune.optimizer.eps=1e-4"
"""Adam magnifies rounding where gradients are nearly zero."""

DROPOUT = "model.backbone.hidden_dropout=0.3"
"""Then the weights tell whether the same random numbers were drawn in the same order."""


def trained(folder: Path, out: str, *settings: str) -> dict[str, torch.Tensor]:
    """Weights of a run whose storage is `out`; it goes on with what lies there."""
    always = f"stages.finetune.steps={STEPS}", f"stages.finetune.checkpoint_every_steps={EVERY}"
    places = f"placement.storage_path={folder / out}", "placement.keep_states=true"
    always = *always, "evaluation.baselines=[]", EPS
    train(own_run(folder, *always, *places, *settings))
    return safetensors.torch.load_file(folder / out / "runs/own/finetune/weights.safetensors")


def cut_back(folder: Path, out: str, to: str) -> None:
    """A copy of a storage as it was when the first checkpoint was there."""
    shutil.copytree(folder / out, folder / to)
    run = folder / to / "runs" / "own"
    (run / "finetune" / "weights.safetensors").unlink()
    shutil.rmtree(run / "finetune" / "train" / f"step-{STEPS:07d}")
    shutil.rmtree(run / "models")
    shutil.rmtree(run / "evaluation", ignore_errors=True)


def steps_after(folder: Path, out: str, seen: int) -> list[dict]:
    return MetricsLog(folder / out / "runs" / "own" / METRICS_FILE).records()[seen:]


def equal(found: dict, expected: dict) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runtimes")


@pytest.fixture(scope="module")
def here(folder):
    return trained(folder, "here", DROPOUT, "placement.runtime=local")


@pytest.fixture(scope="module")
def on_ray(cluster, folder):
    return trained(folder, "ray", DROPOUT, "placement.runtime=ray")


def test_one_worker_gives_the_same_weights_here_and_on_ray(here, on_ray):
    assert equal(here, on_ray)


def test_other_random_numbers_would_show(here, folder):
    assert not equal(here, trained(folder, "other", DROPOUT, "seed=1", "placement.runtime=local"))


@pytest.mark.parametrize(("began", "goes_on"), [("here", "ray"), ("ray", "local")])
def test_a_run_goes_on_in_the_other_runtime(here, on_ray, cluster, folder, began, goes_on):
    again = f"{began}-then-{goes_on}"
    cut_back(folder, began, again)
    assert equal(trained(folder, again, DROPOUT, f"placement.runtime={goes_on}"), here)
    assert [record["step"] for record in steps_after(folder, again, 0)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow(
    "two minutes on two slow cores; the other runtime goes on above, other numbers of workers do "
    "in tests/distributed/test_nvembed.py"
)
def test_a_run_of_this_process_goes_on_with_two_workers(cluster, folder):
    """Without dropout, whose numbers other workers draw otherwise."""
    alone = trained(folder, "calm", "placement.runtime=local")
    cut_back(folder, "calm", "calm-then-two")
    two = trained(folder, "calm-then-two", "placement.workers=2")
    assert [record["workers"] for record in steps_after(folder, "calm-then-two", 0)] == [
        *[1] * EVERY,
        *[2] * (STEPS - EVERY),
    ]
    for name, weight in alone.items():
        torch.testing.assert_close(two[name], weight, atol=1e-4, rtol=1e-3)
