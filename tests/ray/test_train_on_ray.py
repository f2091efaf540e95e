"""Stages on a real Ray cluster: neither a killed worker nor a second submission changes them."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import safetensors.torch
import torch
from failing_job import FailingJob
from made_up_records import made_up_records
from ray.util.placement_group import PlacementGroup
from s3_server import BUCKET, s3_server
from second_node import second_node
from small_device import SmallDevice
from stops_after import StopsAfter
from tiny_models import save_decoder
from waiting_job import WaitingJob

from rayembed.assets.storage import exists, join, list_files, read_bytes
from rayembed.config.data_run import data_of
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.on_ray import ray_pipeline_context
from rayembed.data.prepare import prepare
from rayembed.errors import ArtifactError, DataError, PlacementError
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.training.checkpoints.checkpoint_list import checkpoint_name, listed_checkpoints
from rayembed.training.job import StageJob
from rayembed.training.memory.stage_memory import MEMORY_FILE
from rayembed.training.on_ray import check_placement, train_on_ray

pytestmark = pytest.mark.ray

STEPS, CHECKPOINT_EVERY, KILL_AT = 30, 3, 8
SECONDS = 240
"""For what takes a few, on a machine with nothing else to do."""


def make_run(folder: Path, *, seed: int = 0, dropout: float = 0.3, **placement) -> Run:
    return parse(
        Run,
        {
            "name": "tiny",
            "seed": seed,
            "model": {
                "kind": "nvembed",
                "backbone": {"path": str(folder / "backbone"), "dtype": "float32"},
                "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
                "lora": {"rank": 2, "alpha": 4, "dropout": dropout},
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
            },
            "stages": [
                {
                    "name": "only",
                    "datasets": {"words": 1},
                    "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True},
                    # Adam magnifies rounding where gradients are nearly zero: a larger eps.
                    "optimizer": {"learning_rate": 0.01, "warmup_steps": 1, "eps": 1e-5},
                    "steps": STEPS,
                    "checkpoint_every_steps": CHECKPOINT_EVERY,
                }
            ],
            "evaluation": {"benchmarks": []},
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
    train_on_ray(job, str(folder), folder / METRICS_FILE, 0)
    return found_in(str(folder), run, folder / METRICS_FILE)


def found_in(folder: str, run: Run, log: Path):
    """Weights and steps of a stage that is done; it kept no more checkpoints than it should."""
    files = list_files(join(folder, "train"), recursive=True)
    kept = {part for name in files for part in name.split("/") if part.startswith("step-")}
    newest = range(STEPS, 0, -CHECKPOINT_EVERY)[: run.placement.keep_checkpoints]
    assert kept == {f"step-{step:07d}" for step in newest}
    steps = MetricsLog(log).records()
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1)), "each step once"
    return safetensors.torch.load(read_bytes(join(folder, "weights.safetensors"))), steps


def prepare_on_ray(run: Run) -> dict[str, str]:
    return prepare(run, ray_pipeline_context(data_of(run)))


@pytest.fixture(scope="module")
def plan(cluster, folder):
    return prepare_on_ray(make_run(folder))["only"]


@pytest.fixture(scope="module")
def whole(cluster, folder, plan):
    """Weights of the run that nothing interrupts."""
    return train(make_run(folder), plan, "whole")[0]


CALM = {"dropout": 0.0}
"""Without dropout, whose numbers other workers draw otherwise, it is the same training."""


@pytest.fixture(scope="module")
def calm(cluster, folder, plan):
    """Weights of such a run with one worker that nothing interrupts, and its steps."""
    return train(make_run(folder, **CALM, workers=1), plan, "calm")


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=1e-3)


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


class Elastic:
    """A stage that trains in a thread on one worker or two, and stands still where it is told to.

    A worker takes three CPUs: the first node has room for one, a second one for another.
    """

    def __init__(self, folder: Path, plan: str, name: str, stops: tuple[str, ...], **settings):
        self.place, self.stops = folder / "out" / name, folder / f"stops-{name}"
        self.log = MetricsLog(self.place / METRICS_FILE)
        self.stops.mkdir()
        for stop in stops:
            (self.stops / stop).touch()
        placement = {"min_workers": 1, "cpus_per_worker": 3, "threads_per_worker": 1}
        placement |= {"resize_interval_seconds": 0, "max_failures": 0}
        self.run = make_run(folder, **CALM, **placement)
        self.job = WaitingJob(**vars(job_of(self.run, plan, name)), folder=str(self.stops))

    def __enter__(self) -> "Elastic":
        self._pool = ThreadPoolExecutor(1)
        arguments = self.job, str(self.place), self.log.path, 0
        self.training = self._pool.submit(train_on_ray, *arguments)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.stops)
        self._pool.shutdown()

    def reach(self, steps: int) -> None:
        deadline = time.monotonic() + SECONDS
        while len(self.log.records()) != steps:
            if self.training.done():
                self.training.result()
                raise AssertionError(f"training ended without a stop at step {steps}")
            assert time.monotonic() < deadline, f"step {steps} did not come"
            time.sleep(0.02)

    def await_checkpoint(self, step: int) -> None:
        """Until Train's controller counts it, which learns of it some tenths of a second later."""
        deadline = time.monotonic() + SECONDS
        while checkpoint_name(step) not in listed_checkpoints(str(self.place / "train")):
            assert time.monotonic() < deadline, f"the checkpoint of step {step} did not come"
            time.sleep(0.02)

    def assert_like(self, calm: tuple, workers: list[int]) -> None:
        """The steps had so many workers, and but for rounding they are those of one alone."""
        found, steps = found_in(str(self.place), self.run, self.log.path)
        assert [step["workers"] for step in steps] == workers
        for name in ("loss", "learning_rate", "grad_norm"):
            alone = [step[name] for step in calm[1]]
            assert [step[name] for step in steps] == pytest.approx(alone, rel=1e-3), name
        assert_close(found, calm[0])


# Before runs that are killed: for three minutes Ray's coordinator lets no elastic run have what one
# that is gone had asked it for.
def test_nodes_that_come_and_go_change_the_workers_and_not_the_training(
    cluster, folder, plan, calm, caplog
):
    caplog.set_level("INFO", logger="rayembed")
    with Elastic(folder, plan, "lost", ("1-10", "1-14", "2-20")) as run:
        run.reach(10)
        with second_node(ray.get_runtime_context().gcs_address, num_cpus=3) as node:
            (run.stops / "1-10").unlink()  # the next checkpoint is after step 12
            run.reach(20)
            run.await_checkpoint(18)
            node.lose()
            run.training.result(SECONDS)
    run.assert_like(calm, [1] * 12 + [2] * 6 + [1] * 12)
    assert [line for line in caplog.messages if "workers from" in line] == [
        "stage only: 2 instead of 1 workers from step 13 on",
        "stage only: 1 instead of 2 workers from step 19 on",
    ]


class Killer(threading.Thread):
    """Sends SIGKILL to one process of this Ray as soon as the log has the step.

    Args:
        title: part of the name that Ray gives the process.
        after: called when it is dead.
    """

    def __init__(
        self,
        log: Path,
        step: int,
        title: str = "RayTrainWorker",
        after: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(daemon=True)
        self._log, self._step, self._title, self._after = log, step, title, after
        self._killed_at: float | None = None
        self._problem = "training ended before the step was seen"
        self._trained = threading.Event()
        # Of a training before this one some live on for a while.
        self._of_others = {process.pid for process in self._processes()}
        self.start()

    def _processes(self) -> list[psutil.Process]:
        # `process_iter` leaves out those that end while it looks.
        below = {p.pid for p in psutil.Process().children(recursive=True)}
        return [
            p
            for p in psutil.process_iter(["cmdline"])
            if p.pid in below and self._title in " ".join(p.info["cmdline"] or [])
        ]

    def run(self) -> None:
        deadline = time.monotonic() + SECONDS
        while len(MetricsLog(self._log).records()) < self._step:
            if time.monotonic() > deadline:
                self._problem = f"step {self._step} did not come within {SECONDS} s"
            if time.monotonic() > deadline or self._trained.wait(0.02):
                return
        workers = [one for one in self._processes() if one.pid not in self._of_others]
        if not workers:
            self._problem = f"the step was there, but no {self._title} any more"
            return
        workers[-1].kill()
        self._killed_at = time.time()
        self._after()

    def killed_at(self) -> float:
        """When it was, asked after training."""
        self._trained.set()
        self.join()
        assert self._killed_at is not None, self._problem
        return self._killed_at


def assert_went_on(steps: list, since: float) -> None:
    """Steps up to a checkpoint in the middle were not done again, those after it were.

    Where they went on is told by the longest pause, in which workers start. Workers outlive a
    killed controller by some milliseconds, so steps and a checkpoint may have come after `since`.
    """
    times = [record["time"] for record in steps]
    kept = max(range(1, len(times)), key=lambda n: times[n] - times[n - 1])
    assert times[0] < since < times[kept], (kept, since, times)
    assert kept % CHECKPOINT_EVERY == 0, (kept, since, times)


def test_killed_worker_ends_in_the_weights_of_the_uninterrupted_run(cluster, folder, plan, whole):
    """Whose steps a thread of each worker makes; here a process beside it makes them."""
    killer = Killer(folder / "out" / "killed" / METRICS_FILE, KILL_AT)
    killed, steps = train(make_run(folder, step_processes=1), plan, "killed")
    assert_went_on(steps, killer.killed_at())
    assert_equal(killed, whole)


def test_killed_controller_ends_in_the_weights_of_the_uninterrupted_run(
    cluster, folder, plan, whole, caplog
):
    killer = Killer(folder / "out" / "alone" / METRICS_FILE, KILL_AT, "ray::TrainController")
    alone, steps = train(make_run(folder), plan, "alone")
    assert_went_on(steps, killer.killed_at())
    assert_equal(alone, whole)
    assert "Ray Train's controller has died" in caplog.text
    free_what_the_controller_left()


def free_what_the_controller_left() -> None:
    """CPUs of its workers. Train does it where there is a dashboard, which this Ray lacks."""
    for name, group in ray.util.placement_group_table().items():
        if group["state"] != "REMOVED":
            left = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name)))
            ray.util.remove_placement_group(left)


@pytest.mark.slow("a third kill of the same run; which checkpoint is left out has unit tests")
def test_checkpoint_that_is_damaged_while_workers_train_is_left_out(
    cluster, folder, plan, whole, caplog
):
    """The workers that are started again cannot read it; others go on from the one before."""
    place = folder / "out" / "damaged"

    def damage() -> None:
        time.sleep(
            1
        )  # the controller may still take what was reported before; a start takes longer
        newest = listed_checkpoints(str(place / "train"))[-1]
        state = place / "train" / newest / "state-00001.safetensors"
        os.truncate(state, state.stat().st_size // 2)

    killer = Killer(place / METRICS_FILE, KILL_AT, after=damage)
    damaged, steps = train(make_run(folder), plan, "damaged")
    assert_went_on(steps, killer.killed_at())
    assert_equal(damaged, whole)
    assert "is incomplete and is removed" in caplog.text


def test_a_stage_that_is_done_is_not_run_again(cluster, folder, plan, whole):
    log = folder / "out" / "whole" / METRICS_FILE
    before = log.read_text()
    train(make_run(folder), plan, "whole")
    assert log.read_text() == before


@contextmanager
def driver(run: Run, plan: str, place: str, folder: Path, **environment: str):
    """A process that trains the stage in a place of storage; it and its files lie in `folder`."""
    folder.mkdir()
    (folder / "run.yaml").write_text(run.to_yaml())
    command = [sys.executable, f"{os.environ['TESTS_SUPPORT']}/stage_driver.py"]
    command += [ray.get_runtime_context().gcs_address, f"{folder}/run.yaml", plan, place]
    given = {"OMP_NUM_THREADS": "1", "RAYEMBED_CACHE": str(folder / "cache"), **environment}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **given}, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow(
    "a third kill of the same run; S3 and another machine stand in "
    "tests/jobs/test_train_job_s3.py, a driver that is killed in tests/drill"
)
def test_submitted_again_elsewhere_from_s3_after_its_driver_was_killed(
    cluster, folder, plan, whole, tmp_path, monkeypatch
):
    """The first driver got SIGKILL after a checkpoint; the second one has an empty cache."""
    run, place = make_run(folder), f"s3://{BUCKET}/again"
    first, second = (tmp_path / name for name in ("first", "second"))
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with driver(run, plan, place, first, **environment) as process:
            log = MetricsLog(first / "cache" / "run" / METRICS_FILE)
            deadline = time.monotonic() + SECONDS
            while len(log.records()) < KILL_AT:
                assert process.poll() is None, (first / "log").read_text()
                assert time.monotonic() < deadline, (first / "log").read_text()
                time.sleep(0.02)
        assert not exists(join(place, "weights.safetensors")), "it was killed too late"
        again = time.time()
        with driver(run, plan, place, second, **environment) as process:
            assert process.wait(SECONDS) == 0, (second / "log").read_text()
        weights, steps = found_in(place, run, second / "cache" / "run" / METRICS_FILE)
    assert_went_on(steps, again)
    assert_equal(weights, whole)


@pytest.mark.slow(
    "waits for Ray Train to look for the notice; workers that come and go stand above"
)
def test_a_node_that_is_taken_away_with_notice_costs_no_step_before_the_notice(
    cluster, folder, plan, calm
):
    with Elastic(folder, plan, "drained", ("1-10", "1-14", "2-19", "2-20")) as run:
        run.reach(10)
        with second_node(ray.get_runtime_context().gcs_address, num_cpus=3) as node:
            (run.stops / "1-10").unlink()
            run.reach(19)
            node.announce_its_end(seconds=30)
            time.sleep(12)  # Ray Train looks every five seconds, and so do the workers
            (run.stops / "2-19").unlink()  # then there is a checkpoint after step 20
            run.training.result(SECONDS)
    run.assert_like(calm, [1] * 12 + [2] * 8 + [1] * 10)


def test_other_identity_is_refused_where_a_checkpoint_lies(cluster, folder, plan, whole):
    taken = Path(shutil.copytree(folder / "out" / "whole", folder / "out" / "taken"))
    (taken / "weights.safetensors").unlink()
    with pytest.raises(ArtifactError, match="run_fingerprint"):
        train(make_run(folder, seed=1, max_failures=0), plan, "taken")


def test_a_callback_of_ones_own_goes_along_to_every_worker(cluster, folder, plan, tmp_path):
    run, place = make_run(folder), folder / "out" / "own"
    job = replace(job_of(run, plan, "own"), callbacks=(StopsAfter(4, tmp_path),))
    train_on_ray(job, str(place), place / METRICS_FILE, 0)
    assert [record["step"] for record in MetricsLog(place / METRICS_FILE).records()] == [1, 2, 3, 4]
    assert {path.name for path in tmp_path.iterdir()} == {"0-3", "1-3", "0-4", "1-4"}
    assert listed_checkpoints(str(place / "train"))[-1] == checkpoint_name(4)
    assert job.is_done()


def train_failing(run: Run, plan: str, name: str, error: Exception, times: int) -> Path:
    """The folder of a stage whose only worker raised the error, at most so many times."""
    out = Path(run.placement.storage_path) / name
    out.mkdir(parents=True)
    fields = vars(job_of(run, plan, name))
    job = FailingJob(**fields, error=error, times=times, attempts=str(out / "attempts.txt"))
    train_on_ray(job, str(out), out / METRICS_FILE, 0)
    return out


def test_an_error_of_ours_is_told_once_and_others_are_tried_again(cluster, folder, plan):
    run = make_run(folder, workers=1, max_failures=3)
    with pytest.raises(DataError, match=r"^made up$"):
        train_failing(run, plan, "ours", DataError("made up"), 9)
    assert len((folder / "out" / "ours" / "attempts.txt").read_text().splitlines()) == 1
    others = train_failing(run, plan, "others", RuntimeError("made up"), 1)
    assert len((others / "attempts.txt").read_text().splitlines()) == 1
    assert len(MetricsLog(others / METRICS_FILE).records()) == STEPS


def test_a_worker_that_ran_out_of_memory_makes_all_keep_less(cluster, folder, plan, whole):
    run = make_run(folder, max_failures=1)
    out = folder / "out" / "full"
    job = replace(job_of(run, plan, "full"), callbacks=(SmallDevice(KILL_AT, of_rank=1),))
    train_on_ray(job, str(out), out / METRICS_FILE, 0)
    assert_equal(found_in(str(out), run, out / METRICS_FILE)[0], whole)
    assert json.loads((out / "train" / MEMORY_FILE).read_text())["graph_bytes"] > 0


def test_more_workers_than_the_cluster_has_is_refused_at_once(cluster, folder):
    with pytest.raises(PlacementError, match="workers=8"):
        check_placement(make_run(folder, workers=8).placement)
