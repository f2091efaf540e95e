"""Decide how many trials run at the same time on a cluster, and with which resources. Independent
of Ray.
"""

from collections.abc import Sequence

from rayembed.config.placement import Placement
from rayembed.errors import PlacementError
from rayembed.training.memory.capacity import (
    Node,
    validation_resources,
    with_named_gpu,
    worker_resources,
)
from rayembed_extras.sweeps.settings import Sweep


def trials_at_once(placement: Placement, free: Sequence[Node], *, validates: bool) -> int:
    """Count the trials, including their validation, that fit into the free resources of the
    nodes.

    Ray Tune counts only what its own small actor of a trial takes. Trials that Ray Train then
    cannot place would wait for each other's workers for ever, so the number must be said. An
    elastic trial counts with the most workers that it may grow to.

    Args:
        free: resources of each node that nobody holds.

    Raises:
        PlacementError: not even one trial fits.
    """
    workers = [worker_resources(placement)] * placement.workers
    beside = [validation_resources(placement)] * placement.validations_at_once if validates else []
    free = with_named_gpu(placement, free)
    found = _that_fit([*workers, *beside], free)
    if found:
        return found
    # One trial alone may begin with its fewest workers, and score its weights when they are done;
    # two would wait for each other.
    if _that_fit(workers[: placement.fewest_workers], free):
        return 1
    setting = "min_workers" if placement.is_elastic else "workers"
    raise PlacementError(
        "no trial fits into the free resources: a trial needs "
        f"placement.{setting}={placement.fewest_workers} workers with {workers[0]} each, but the "
        f"nodes have {[dict(node) for node in free]} free. Most likely other jobs hold their CPUs "
        "and GPUs: free these resources (`ray status` shows what is taken), or lower "
        f"placement.{setting} or placement.cpus_per_worker"
    )


def with_cores_of_their_own(sweep: Sweep, at_once: int) -> Sweep:
    """Limit worker threads to the reserved CPUs if several trials run at the same time.

    A recipe for a small machine may give its one worker all cores while it reserves one of them.
    Two such trials at a time on two cores were measured at a fifth of the speed of one: threads
    that wait for each other's turn.
    """
    placement = sweep.base.placement
    cpus = max(1, int(placement.cpus_per_worker))
    if at_once == 1 or placement.threads <= cpus:
        return sweep
    return sweep.placed(threads_per_worker=cpus)


def _that_fit(bundles: Sequence[Node], free: Sequence[Node]) -> int:
    """Count how many copies of a group of resource bundles fit; each bundle is placed on one node,
    the largest first.
    """
    left = [dict(node) for node in free]
    ordered = sorted(bundles, key=lambda b: (b.get("GPU", 0.0), b.get("CPU", 0.0)), reverse=True)
    count = 0
    while True:
        for bundle in ordered:
            node = next((node for node in left if _holds(node, bundle)), None)
            if node is None:
                return count
            for kind, amount in bundle.items():
                node[kind] = node.get(kind, 0.0) - amount
        count += 1


def _holds(node: Node, bundle: Node) -> bool:
    # 0.9 - 0.3 - 0.3 is a little less than 0.3.
    return all(node.get(kind, 0.0) + 1e-9 >= amount for kind, amount in bundle.items())
