"""Check whether the cluster's nodes can hold a run's workers, and wait until they can.

Knows no Ray: the nodes' resources are handed in.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rayembed.config.evaluation import EvaluationPlacement
from rayembed.config.placement import Placement
from rayembed.display.progress import doing
from rayembed.errors import PlacementError
from rayembed.machine.device import KIND, gpu_kinds, has_named_gpu

logger = logging.getLogger(__name__)

Node = Mapping[str, float]
"""Resources of one live node by Ray's names; only `CPU` and `GPU` are used."""

_POLL_SECONDS = 2.0


def worker_resources(placement: Placement | EvaluationPlacement) -> dict[str, float]:
    """Return the resources that each training worker reserves, by Ray's names."""
    resources = {"CPU": placement.cpus_per_worker}
    return {**resources, "GPU": 1.0} if placement.on_gpu else resources


def workers_that_fit(placement: Placement, nodes: Sequence[Node]) -> int:
    """Count the workers that fit on the nodes while these are empty; only nodes with GPUs of the
    kind `placement.gpu` count.
    """
    wanted = worker_resources(placement)
    return sum(
        min(_times(node, kind, wanted[kind]) for kind in wanted)
        for node in with_named_gpu(placement, nodes)
    )


def with_named_gpu(placement: Placement, nodes: Sequence[Node]) -> list[Node]:
    """Select the nodes on which workers may run, including nodes whose kind of GPU is unknown."""
    return [node for node in nodes if has_named_gpu(placement.gpu, node)]


def kind_resource(
    placement: Placement | EvaluationPlacement, nodes: Sequence[Node]
) -> dict[str, float]:
    """Return the Ray resource that restricts a worker to GPUs of the named kind; empty if all nodes
    have that kind.

    An autoscaler knows no kinds: on equal nodes it must be able to replace one that is lost.
    """
    gpu = getattr(placement, "gpu", None)
    others = set(gpu_kinds([node for node in nodes if not has_named_gpu(gpu, node)]))
    names = Counter(
        name
        for node in nodes
        if has_named_gpu(gpu, node)
        for name in gpu_kinds([node])
        if name not in others
    )
    if not others or not names:
        return {}
    # As Ray's own `accelerator_type` option; the name that most nodes of the kind have.
    return {f"{KIND}{names.most_common(1)[0][0]}": 0.001}


def most_workers(numbers: Sequence[int], room: int) -> int:
    """Return the largest of the allowed numbers of workers that fits; 0 if none fits."""
    return max((number for number in numbers if number <= room), default=0)


def validation_resources(placement: Placement) -> dict[str, float]:
    """Return the resources of each task that scores weights during training, by Ray's names."""
    cpus = placement.validation_cpus or placement.cpus_per_worker
    gpus = placement.validation_gpus
    if gpus is None:
        gpus = 1.0 if placement.on_gpu else 0.0
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def check_validation_capacity(placement: Placement, nodes: Sequence[Node]) -> None:
    """Check that some node is large enough for a validation task, at least once the workers have
    ended.

    Where nodes are waited for, one may come for the task.

    Raises:
        PlacementError: no node can, so that the run would wait for its scores for ever.
    """
    wanted = validation_resources(placement)
    fits = any(all(_times(node, kind, wanted[kind]) for kind in wanted) for node in nodes)
    if not fits and not placement.wait_for_nodes_seconds:
        raise PlacementError(
            f"no node has the {_shown(wanted)} that a validation task needs: the cluster has "
            f"{_shown_nodes(nodes, wanted)}. Lower placement.validation_cpus or placement."
            "validation_gpus, add larger nodes, or set evaluation.validation=null"
        )
    workers = {kind: placement.workers * n for kind, n in worker_resources(placement).items()}
    total = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in wanted}
    if any(total[kind] < workers.get(kind, 0.0) + wanted[kind] for kind in wanted):
        logger.warning(
            "the cluster has no room for a validation task (%s) next to %d workers: "
            "weights are scored only after a stage's training, so early stopping has no "
            "effect",
            *(_shown(wanted), placement.workers),
        )


def check_capacity(placement: Placement, nodes: Sequence[Node]) -> None:
    """Check that the nodes can hold the run's workers, or the minimum number for an elastic
    run.

    Raises:
        PlacementError: too few or too small nodes; says what was asked, what is there, what to do.
    """
    needed, fit = placement.fewest_workers, workers_that_fit(placement, nodes)
    kinds = gpu_kinds(nodes)
    if fit >= needed:
        if placement.on_gpu and placement.gpu is None and placement.workers > 1 and len(kinds) > 1:
            logger.warning(
                "the nodes have GPUs of several kinds (%s), and all workers wait for the "
                "slowest; set placement.gpu to use one kind",
                ", ".join(kinds),
            )
        if fit < placement.workers:
            logger.info(
                "the cluster has room for %d of %d workers now: training begins with the "
                "largest number of them that splits its batches equally, and adds workers "
                "when nodes join",
                *(fit, placement.workers),
            )
        return
    setting = "placement.min_workers" if placement.is_elastic else "placement.workers"
    wanted = worker_resources(placement)
    total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in wanted}
    enough = all(total[kind] >= needed * wanted[kind] for kind in wanted)
    if placement.on_gpu and not total["GPU"]:
        problem = "no node has a GPU"
        advice = "set placement.use_gpu=false, or add nodes with GPUs"
    elif placement.on_gpu and not any(node.get("GPU") for node in with_named_gpu(placement, nodes)):
        problem = f"no node has GPUs of the kind {placement.gpu}, they have {', '.join(kinds)}"
        advice = "correct or remove placement.gpu, or add nodes with such GPUs"
    elif fit == 0:
        problem = "no node is large enough for one worker"
        advice = "lower placement.cpus_per_worker, or add larger nodes"
    elif enough:
        problem = f"the cluster has enough in total, but only {fit} fit, each whole on one node"
        advice = f"lower {setting} or placement.cpus_per_worker, or add nodes"
    else:
        problem = f"only {fit} fit"
        advice = f"lower {setting} to {fit} or placement.cpus_per_worker, or add nodes"
    if placement.on_gpu and total["GPU"]:
        advice += ", or compute on CPUs (placement.use_gpu=false)"
    raise PlacementError(
        f"{setting}={needed} need {_shown(wanted)} each: {problem}. The cluster has "
        f"{_shown_nodes(nodes, wanted)}. Please {advice}; on a cluster that adds nodes on "
        "demand, set placement.wait_for_nodes_seconds."
    )


def await_capacity(
    placement: Placement,
    nodes: Callable[[], Sequence[Node]],
    request: Callable[[list[dict[str, float]]], object],
    *,
    runs: int = 1,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait up to `wait_for_nodes_seconds` for nodes that can hold the run's workers.

    An elastic run waits for the fewest alone: when it trains, Ray Train asks for the other nodes.

    Args:
        nodes: resources of the nodes that are alive now.
        request: asks the cluster for nodes that hold these bundles at a time; an empty list takes
            the last request back. Called only where there is something to wait for.
        runs: how many such runs the nodes should hold at a time; one is enough in the end.

    Raises:
        PlacementError: as `check_capacity`.
    """
    seconds, needed = placement.wait_for_nodes_seconds, placement.fewest_workers * runs
    if not seconds or workers_that_fit(placement, nodes()) >= needed:
        return check_capacity(placement, nodes())
    logger.info("waiting up to %g s for nodes that hold %d workers", seconds, needed)
    deadline = clock() + seconds
    request([worker_resources(placement)] * needed)
    try:
        with doing(f"waiting for nodes that hold {needed} workers"):
            while clock() < deadline and workers_that_fit(placement, nodes()) < needed:
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
    """Format the distinct node sizes with their counts, largest first."""
    sizes = Counter(tuple(node.get(kind, 0.0) for kind in kinds) for node in nodes)
    parts = [
        f"{count} × ({_shown(dict(zip(kinds, size, strict=True)))})"
        for size, count in sorted(sizes.items(), reverse=True)
    ]
    return f"the nodes {', '.join(parts)}" if parts else "no nodes"
