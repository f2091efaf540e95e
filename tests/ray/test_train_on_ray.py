"""Stages on a real Ray cluster: neither a killed worker nor a second submission changes them."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from failing_job import FailingJob
from made_up_records import made_up_records
from tiny_models import save_decoder

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.on_ray import prepare_data
from rayembed.errors import ArtifactError, DataError, PlacementError
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.on_ray import check_placement, train_stage_on_ray
from rayembed.training.worker import StageJob

pytestmark = pytest.mark.ray

STEPS = 8


def make_run(folder: Path, *, seed: int = 0, **placement) -> Run:
    return parse(
        Run,
        {
            "name": "tiny",
            "seed": seed,
            "model": {
                "kind": "nvembed",
                "backbone": {"path": str(folder / "backbone"), "dtype": "bfloat16"},
                "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
                "lora": {"rank": 2, "alpha": 4, "dropout": 0.3},
                "query_max_length": 32,
                "document_max_length": 32,
            },
            "data": {
                "root": str(folder),
                "datasets": [
                    {
                        "name": "words",
                        "source": {
                            "kind": "pairs",
                            "path": "words.jsonl",
                            "negatives": "negatives",
                        },
                        "query_instruction": "find",
                    }
                ],
                "held_out": {"num_titles": 0},
            },
            "stages": [
                {
                    "name": "only",
                    "datasets": {"words": 1},
                    "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True},
                    "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
                    "steps": STEPS,
                    "checkpoint_every_steps": 2,
                }
            ],
            "evaluation": {"suite": "none"},
            "placement": {
                "storage_path": str(folder / "out"),
                "workers": 2,
                "cpus_per_worker": 1,
                "zero_stage": 2,
                "micro_batch_tokens": 64,
                **placement,
            },
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    save_decoder(folder / "backbone")
    lines = [
        json.dumps(
            {
                "query": r.query,
                "positive": r.positives[0],
                "negatives": [n.text for n in r.negatives],
            }
        )
        for r in made_up_records(64)
    ]
    (folder / "words.jsonl").write_text("\n".join(lines))
    return folder


def job_of(run: Run, plan: str, name: str) -> StageJob:
    return StageJob(run, 0, plan, None, f"{run.placement.storage_path}/{name}/weights.safetensors")


def train(run: Run, plan: str, name: str):
    job = job_of(run, plan, name)
    folder = Path(run.placement.storage_path) / name
    train_stage_on_ray(job, str(folder), folder / "metrics.jsonl", 0)
    return safetensors.torch.load_file(job.weights), MetricsLog(folder / "metrics.jsonl").records()


def kill_a_worker_after(log: Path, step: int, killed: list[float]) -> threading.Thread:
    """Send SIGKILL to one training worker of this Ray as soon as the log has the step."""

    def watch():
        while len(MetricsLog(log).records()) < step:
            time.sleep(0.02)
        # `process_iter` leaves out those that end while it looks.
        below = {p.pid for p in psutil.Process().children(recursive=True)}
        workers = [
            p
            for p in psutil.process_iter(["cmdline"])
            if p.pid in below and "RayTrainWorker" in " ".join(p.info["cmdline"] or [])
        ]
        killed.append(time.time())
        os.kill(workers[-1].pid, signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_killed_worker_ends_in_the_weights_of_the_uninterrupted_run(cluster, folder):
    run = make_run(folder)
    plan = prepare_data(run, str(folder / "out" / "data"))["only"]
    whole, steps = train(run, plan, "whole")
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))

    times: list[float] = []
    killer = kill_a_worker_after(folder / "out" / "killed" / "metrics.jsonl", 5, times)
    killed, steps = train(run, plan, "killed")
    killer.join()
    (killed_at,) = times
    # Steps up to the last checkpoint that Train had taken were not done again, the others were.
    kept = sum(r["time"] < killed_at for r in steps)
    assert kept in (2, 4, 6), kept
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1)), "each step once"
    for name in whole:
        assert torch.equal(whole[name], killed[name]), name

    # A stage that is done is not run again.
    before = (folder / "out" / "whole" / "metrics.jsonl").read_text()
    train(run, plan, "whole")
    assert (folder / "out" / "whole" / "metrics.jsonl").read_text() == before


def test_other_identity_is_refused_where_a_checkpoint_lies(cluster, folder):
    run = make_run(folder)
    plan = prepare_data(run, str(folder / "out" / "data"))["only"]
    Path(job_of(run, plan, "whole").weights).unlink()  # of the test above: checkpoints stay
    with pytest.raises(ArtifactError, match="run_fingerprint"):
        train(make_run(folder, seed=1, max_failures=0), plan, "whole")


def train_failing(run: Run, plan: str, name: str, error: Exception, times: int) -> Path:
    """The folder of a stage whose only worker raised the error, at most so many times."""
    out = Path(run.placement.storage_path) / name
    out.mkdir(parents=True)
    fields = vars(job_of(run, plan, name))
    job = FailingJob(**fields, error=error, times=times, attempts=str(out / "attempts.txt"))
    train_stage_on_ray(job, str(out), out / "metrics.jsonl", 0)
    return out


def test_an_error_of_ours_is_told_once_and_others_are_tried_again(cluster, folder):
    run = make_run(folder, workers=1, max_failures=3)
    plan = prepare_data(run, str(folder / "out" / "data"))["only"]
    with pytest.raises(DataError, match=r"^made up$"):
        train_failing(run, plan, "ours", DataError("made up"), 9)
    assert len((folder / "out" / "ours" / "attempts.txt").read_text().splitlines()) == 1
    others = train_failing(run, plan, "others", RuntimeError("made up"), 1)
    assert len((others / "attempts.txt").read_text().splitlines()) == 1
    assert len(MetricsLog(others / "metrics.jsonl").records()) == STEPS


def test_more_workers_than_the_cluster_has_is_refused_at_once(cluster, folder):
    with pytest.raises(PlacementError, match="workers=8"):
        check_placement(make_run(folder, workers=8).placement)
