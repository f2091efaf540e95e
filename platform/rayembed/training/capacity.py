"""Whether a cluster's nodes can hold a run's training workers, and waiting until they can.

Knows no Ray: the nodes' resources are handed in.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rayembed.config.run import Placement
from rayembed.errors import PlacementError

logger = logging.getLogger(__name__)

Node = Mapping[str, float]
"""Resources of one live node by Ray's names; those that count are `CPU` and `GPU`."""

_POLL_SECONDS = 2.0


def worker_resources(placement: Placement) -> dict[str, float]:
    """What each training worker reserves, by Ray's names."""
    resources = {"CPU": placement.cpus_per_worker}
    return {**resources, "GPU": 1.0} if placement.use_gpu else resources


def workers_that_fit(placement: Placement, nodes: Sequence[Node]) -> int:
    """How many workers the nodes can hold when nothing else runs; a worker lies on one node."""
    wanted = worker_resources(placement)
    return sum(min(_times(node, kind, wanted[kind]) for kind in wanted) for node in nodes)


def check_capacity(placement: Placement, nodes: Sequence[Node]) -> None:
    """Return when the nodes can hold the run's workers.

    Raises:
        PlacementError: too few or too small nodes; says what was asked, what is there, what to do.
    """
    fit = workers_that_fit(placement, nodes)
    if fit >= placement.workers:
        return
    wanted = worker_resources(placement)
    total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in wanted}
    enough = all(total[kind] >= placement.workers * wanted[kind] for kind in wanted)
    if placement.use_gpu and not total["GPU"]:
        problem = "no node has a GPU"
        advice = "set placement.use_gpu=false, or add nodes with GPUs"
    elif fit == 0:
        problem = "no node is large enough for one worker"
        advice = "lower placement.cpus_per_worker, or add larger nodes"
    elif enough:
        problem = f"the cluster has enough in total, but only {fit} fit, each whole on one node"
        advice = "lower placement.workers or placement.cpus_per_worker, or add nodes"
    else:
        problem = f"only {fit} fit"
        advice = f"lower placement.workers to {fit} or placement.cpus_per_worker, or add nodes"
    raise PlacementError(
        f"placement.workers={placement.workers} need {_shown(wanted)} each: {problem}. The cluster "
        f"has {_shown_nodes(nodes, wanted)}. Please {advice}; on a cluster that adds nodes when "
        "they are asked for, set placement.wait_for_nodes_seconds."
    )


def await_capacity(
    placement: Placement,
    nodes: Callable[[], Sequence[Node]],
    request: Callable[[list[dict[str, float]]], object],
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when the nodes can hold the run's workers, after `wait_for_nodes_seconds` at most.

    Args:
        nodes: resources of the nodes that are alive now.
        request: asks the cluster for nodes that hold these bundles at a time; an empty list takes
            the last request back. Called only where there is something to wait for.

    Raises:
        PlacementError: as `check_capacity`.
    """
    seconds = placement.wait_for_nodes_seconds
    if not seconds or workers_that_fit(placement, nodes()) >= placement.workers:
        return check_capacity(placement, nodes())
    logger.info("waiting up to %g s for nodes that hold %d workers", seconds, placement.workers)
    deadline = clock() + seconds
    request([worker_resources(placement)] * placement.workers)
    try:
        while clock() < deadline and workers_that_fit(placement, nodes()) < placement.workers:
            sleep(min(_POLL_SECONDS, seconds))
        check_capacity(placement, nodes())
    finally:
        # Workers ask again by themselves; a request that stays would keep the nodes for ever.
        request([])


def _times(node: Node, kind: str, amount: float) -> int:
    # 0.9 / 0.3 is a little less than 3.
    return math.floor(node.get(kind, 0.0) / amount + 1e-9)


def _shown(resources: Node) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def _shown_nodes(nodes: Sequence[Node], kinds: Mapping[str, float]) -> str:
    """The sizes of nodes with how many there are of each, the largest first."""
    sizes = Counter(tuple(node.get(kind, 0.0) for kind in kinds) for node in nodes)
    parts = [
        f"{count} × ({_shown(dict(zip(kinds, size, strict=True)))})"
        for size, count in sorted(sizes.items(), reverse=True)
    ]
    return f"the nodes {', '.join(parts)}" if parts else "no nodes"
