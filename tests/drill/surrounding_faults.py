"""What a run needs beside its workers: Ray's object store, and MLflow."""

import collections
import contextlib
import os
import signal
import threading
import time

import psutil
from mlflow_server import MlflowServer
from scene import CHECKPOINT_EVERY, FAULT_AT, STEPS, WORKERS, Scene, UnexpectedError

SMALLEST_PLASMA = 80_000_000
"""Bytes; Ray takes no less than 75 MiB."""

PIECE, PIECES = 8_000_000, 20
"""Bytes of an object that is put into the store, and how many of them are held: twice its size."""


def object_store_full(scene: Scene) -> tuple[str, str]:
    """Somebody holds twice what the store can, and keeps putting more, while the run is trained."""
    with Pressure(scene) as pressure:
        job = scene.submit()
        job.ends_with(0)
    if not pressure.spilled:
        raise UnexpectedError("nothing was spilled, so the store was not full")
    seen = f"nothing; Ray wrote up to {pressure.spilled / 1e6:.0f} MB of objects to disk"
    return seen, "nothing"


FREE_MEMORY = 6_000_000_000
"""Bytes that may be taken after the cluster has started, before Ray kills a worker."""

BEYOND = 500_000_000
"""Bytes that are taken beyond that."""


def memory_full(scene: Scene) -> tuple[str, str]:
    """Somebody takes the machine's memory, until Ray kills a worker, and gives it back then.

    A worker stands still meanwhile: else the run, which is small, would be over before.
    """
    job = scene.submit()
    scene.wait_for_step(FAULT_AT, job)
    stopped = scene.nodes.processes("RayTrainWorker")[-1]
    stopped.send_signal(signal.SIGSTOP)
    held: list[bytes] = []

    def fewer() -> bool:
        if psutil.virtual_memory().available > scene.nodes.least_available - BEYOND:
            held.append(b"x" * 100_000_000)
        return len(scene.nodes.processes("RayTrainWorker")) < WORKERS

    scene.wait_for(fewer, job, "a worker that Ray kills")
    held.clear()
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.send_signal(signal.SIGCONT)
    job.ends_with(0)
    return job.line(r"memory of node \S+ was full"), "nothing, or gives the node more memory"


class Pressure:
    """Objects in the store for as long as the `with` block runs."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.spilled = 0
        """Most bytes that lay on disk at a time."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._press, daemon=True)

    def __enter__(self) -> "Pressure":
        import ray

        ray.init(self._scene.nodes.address, log_to_driver=False, logging_level="ERROR")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        self._ended.set()
        self._thread.join()
        ray.shutdown()

    def _press(self) -> None:
        import ray

        held: collections.deque[object] = collections.deque(maxlen=PIECES)
        while not self._ended.wait(0.2):
            held.append(ray.put(os.urandom(PIECE)))
            self.spilled = max(self.spilled, self._scene.nodes.spilled_bytes)


def mlflow_away(scene: Scene) -> tuple[str, str]:
    """The MLflow server dies in the middle and comes back before the end."""
    server = MlflowServer(scene.folder / "server")
    try:
        server.start()
        # Each checkpoint waits for the controller's next look: training outlasts the restart.
        job = scene.submit(
            f"placement.tracking_uri={server.uri}", RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="5"
        )
        scene.wait_for_step(CHECKPOINT_EVERY, job)
        server.kill()
        scene.wait_for(lambda: "Training goes on." in job.text(), job, "a warning")
        server.start()
        job.ends_with(0)
        check_tracked(server)
    finally:
        server.kill()
    return f"{job.line('no MLflow server at')} … {job.line('Training goes on.')}", "nothing"


def check_tracked(server: MlflowServer) -> None:
    """Raise an error unless MLflow has one run, finished, with each step once."""
    from mlflow import MlflowClient

    deadline = time.monotonic() + 30
    client = MlflowClient(server.uri, server.uri)
    while True:
        runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
        states = [run.info.status for run in runs]
        steps = [
            sorted(point.step for point in client.get_metric_history(run.info.run_id, "train/loss"))
            for run in runs
        ]
        if (states, steps) == (["FINISHED"], [list(range(1, STEPS + 1))]):
            return
        if time.monotonic() > deadline:
            raise UnexpectedError(f"MLflow has runs {states} with steps {steps}")
        time.sleep(0.5)
