"""A sweep over a tiny model: its submission, and one that is killed in the middle."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import prepared
import psutil
from forked_workers import script
from tiny_job import ROOT

from rayembed_extras.sweeps.trial_store import TrialRecord, TrialStore

RATE = "stages.retrieval.optimizer.learning_rate"


def command(folder: Path, rates: Sequence[str], *arguments: str) -> list[str]:
    """A sweep over learning rates of the tiny job's first stage, with ASHA, one trial at a time."""
    return sweep_over(
        folder,
        f"grid({', '.join(rates)})",
        *("--scheduler", "asha", "--with", "scheduler.reduction_factor=2"),
        *("--with", "trials_at_once=1", *arguments),
    )


def sweep_over(
    folder: Path, rates: str, *arguments: str, steps: int = 8, every: int = 4
) -> list[str]:
    """A sweep over learning rates, with a score every so many steps."""
    return [
        *script("jobs/sweep_recipe.py", "--recipe", f"{folder}/run.yaml"),
        *("--name", "rates", *_settings(rates, steps, every), *arguments),
    ]


def alone(folder: Path, rate: str, *arguments: str, steps: int = 8, every: int = 4) -> list[str]:
    """The training, by itself and under another name, of a trial of this rate."""
    return [
        *script("jobs/train_nvembed.py", "--recipe", f"{folder}/run.yaml"),
        *("--name", "alone", *_settings(rate, steps, every), *arguments),
    ]


def _settings(rate: str, steps: int, every: int) -> list[str]:
    settings = {
        RATE: rate,
        "evaluation.benchmarks": "[]",
        "evaluation.validation.every_steps": str(every),
        "stages.retrieval.steps": str(steps),
        "stages.retrieval.checkpoint_every_steps": str(every),
        "placement.cpus_per_worker": "0.5",
    }
    given = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    return ["--stage", "retrieval", *given]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}


def submit(given: list[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
    return prepared.run(given, cwd=ROOT, env=environment(), timeout=seconds)


def kill_in_the_middle(
    given: list[str], folder: Path, *, done: int, seconds: float
) -> dict[str, TrialRecord]:
    """Records as a driver leaves them that is killed when so many trials have ended and another
    one is trained.
    """
    trial_store = TrialStore(str(folder / "outputs" / "sweeps" / "rates"))
    runs = folder / "outputs" / "runs"
    log = folder / "killed.log"
    with log.open("w") as file:
        process = prepared.Forked(given, cwd=ROOT, env=environment(), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + seconds
        while True:
            ended = [record for record in trial_store.read().values() if record.is_done]
            begun = list(runs.glob("rates-*/metrics.jsonl")) if runs.exists() else []
            if len(ended) >= done and len(begun) > len(ended):
                break
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return trial_store.read()


def submit_with_a_dying_trial(
    given: list[str], folder: Path, known: Collection[str], *, seconds: float
) -> tuple[int, str, str]:
    """Exit code and log of a sweep, and the run whose process got SIGKILL once it had a step."""
    log = folder / "again.log"
    with log.open("w") as file:
        process = prepared.Forked(given, cwd=ROOT, env=environment(), stdout=file, stderr=file)
    deadline = time.monotonic() + seconds
    killed = ""
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            new = [
                path.parent.name
                for path in (folder / "outputs" / "runs").glob("rates-*/metrics.jsonl")
                if path.parent.name not in known
            ]
            runners = [] if killed or not new else _runners()
            if runners:
                killed = new[0]
                runners[0].kill()
            time.sleep(0.2)
    finally:
        process.kill()
    return process.wait(), log.read_text(), killed


def _runners() -> list[psutil.Process]:
    """Those of the only sweep: a forked worker is not below its driver."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any("run_events" in word for word in process.cmdline()[:1]):
                found.append(process)
    return found
