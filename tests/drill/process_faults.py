"""Processes and nodes that die: Train and the platform go on by themselves."""

from scene import FAULT_AT, WORKERS, Scene, UnexpectedError

NOTHING = "nothing"


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
    busy = [
        node
        for node in range(1, WORKERS + 1)  # the head stays, with the driver
        if scene.nodes.processes("RayTrainWorker", node)
    ]
    if not busy:
        raise UnexpectedError("no node beside the head has a worker")
    scene.nodes.kill_node(busy[0])
    job.ends_with(0)
    # Whichever Train sees first: the worker that is gone, or the other one, which misses it.
    return job.line(r"worker \d+ (died|failed)"), NOTHING
