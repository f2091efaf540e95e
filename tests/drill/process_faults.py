"""Processes and nodes that die or stand still: Train and the platform go on by themselves."""

import signal

from scene import FAULT_AT, WORKERS, Scene, UnexpectedError

NOTHING = "nothing"

PATIENCE = 20
"""Seconds for what takes ten minutes otherwise: a collective, an answer to Train's controller."""


def worker_killed(scene: Scene) -> tuple[str, str]:
    """SIGKILL for one of the training workers."""
    job = scene.submit()
    scene.wait_for_step(FAULT_AT, job)
    scene.nodes.processes("RayTrainWorker")[-1].kill()
    job.ends_with(0)
    return job.line(r"worker \d+ died"), NOTHING


def controller_killed(scene: Scene) -> tuple[str, str]:
    """SIGKILL for the actor that watches the workers."""
    job = scene.submit()
    scene.wait_for_step(FAULT_AT, job)
    (controller,) = scene.nodes.processes("ray::TrainController")
    controller.kill()
    job.ends_with(0)
    return job.line("Ray Train's controller has died"), NOTHING


def node_removed(scene: Scene) -> tuple[str, str]:
    """A node with a worker is lost; one that was idle takes its place."""
    job = scene.submit()
    scene.wait_for_step(FAULT_AT, job)
    scene.nodes.kill_node(_with_a_worker(scene))
    job.ends_with(0)
    # Whichever Train sees first: the worker that is gone, or the other one, which misses it.
    return job.line(r"worker \d+ (died|failed)"), NOTHING


def node_cut_off(scene: Scene) -> tuple[str, str]:
    """A node with a worker loses its network, and lives on alone; an idle one takes its place."""
    job = scene.submit(f"placement.collective_timeout_seconds={PATIENCE}")
    scene.wait_for_step(FAULT_AT, job)
    scene.nodes.cut_off(_with_a_worker(scene))
    job.ends_with(0)
    return job.line(r"worker \d+ (died|failed)|the training hangs"), NOTHING


def _with_a_worker(scene: Scene) -> int:
    """A node beside the head, which stays with the driver."""
    for node in range(1, WORKERS + 1):
        if scene.nodes.processes("RayTrainWorker", node):
            return node
    raise UnexpectedError("no node beside the head has a worker")


def worker_stopped(scene: Scene) -> tuple[str, str]:
    """SIGSTOP for one of the training workers: it lives, and comes to no collective."""
    job = scene.submit(f"placement.collective_timeout_seconds={PATIENCE}")
    scene.wait_for_step(FAULT_AT, job)
    scene.nodes.processes("RayTrainWorker")[-1].send_signal(signal.SIGSTOP)
    job.ends_with(0)
    return job.line(r"the training hangs\. .*says nothing.*did not arrive"), NOTHING


def all_workers_stopped(scene: Scene) -> tuple[str, str]:
    """SIGSTOP for all training workers: nobody is there to see a collective time out."""
    job = scene.submit(f"placement.collective_timeout_seconds={PATIENCE}")
    scene.wait_for_step(FAULT_AT, job)
    for worker in scene.nodes.processes("RayTrainWorker"):
        worker.send_signal(signal.SIGSTOP)
    job.ends_with(0)
    return job.line(r"worker \d+ (died|failed)"), NOTHING


def head_lost(scene: Scene) -> tuple[str, str]:
    """The head dies with the cluster's state; the job is submitted again to another cluster."""
    job = scene.submit()
    scene.wait_for_step(FAULT_AT, job)
    scene.nodes.kill_head()
    job.ends_in_failure()
    scene.new_cluster()
    scene.submit().ends_with(0)
    return job.last_line(), "submits again (a RayJob and Slurm do so by themselves)"
