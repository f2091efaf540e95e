"""List the GPUs of a cluster's live nodes, and check by a small task on each node that torch can
use them.
"""

import logging
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayembed.config.settings import Settings
from rayembed.display.progress import doing
from rayembed.machine.device import SeenGpus, has_named_gpu, nodes_gpus
from rayembed.machine.gpu_check import gpu_facts, gpu_problem

logger = logging.getLogger(__name__)

_SECONDS = 60
"""Timeout in seconds for a node whose GPUs are all in use."""


def cluster_gpus(placement: Settings) -> SeenGpus:
    """Return the GPUs of the live nodes on which a placement's workers may run.

    They are checked unless the placement takes none or waits for nodes, which training checks when
    they are there.
    """
    uses = getattr(placement, "use_gpu", False) is not False
    waits = bool(getattr(placement, "wait_for_nodes_seconds", 0.0))
    return live_gpus(getattr(placement, "gpu", None), check=uses and not waits)


def live_gpus(gpu: str | None = None, *, check: bool) -> SeenGpus:
    """Count the GPUs of the live nodes; with `check`, test each node, leave out unusable GPUs and
    describe their problems.

    Args:
        gpu: kind that a placement names; None: any.
    """
    nodes = live_nodes()
    seen = nodes_gpus([node["Resources"] for node in nodes])
    if not check or not seen.number:
        return seen
    problems = gpu_problems(gpu)
    usable = sum(
        int(node["Resources"].get("GPU", 0)) for node in nodes if node["NodeID"] not in problems
    )
    return replace(seen, number=usable, problem="; ".join(dict.fromkeys(problems.values())))


def gpu_problems(gpu: str | None = None) -> dict[str, str]:
    """Check driver, CUDA and a small matrix product in a one-GPU task on each live node
    with GPUs.

    A node whose GPUs are all taken is warned of and not checked.

    Args:
        gpu: kind that a placement names; nodes of other kinds are not checked. None: any.

    Returns:
        ID of each node that cannot compute → what is wrong and what to do.
    """
    nodes = [
        node["NodeID"]
        for node in live_nodes()
        if node["Resources"].get("GPU") and has_named_gpu(gpu, node["Resources"])
    ]
    task = ray.remote(num_cpus=0, num_gpus=1, max_retries=1)(gpu_facts)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    asked = {task.options(scheduling_strategy=p).remote(): p.node_id for p in places}
    with doing(f"checking driver and GPU of {len(nodes)} nodes"):
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_SECONDS)
    for one in late:
        ray.cancel(one)
    if late:
        logger.warning(
            "%d of %d nodes had no GPU free for %d s, so their driver and GPUs are not checked",
            *(len(late), len(nodes), _SECONDS),
        )
    problems = {asked[one]: _problem(one) for one in done}
    return {node: problem for node, problem in problems.items() if problem}


def _problem(checked: Any) -> str | None:
    try:
        return gpu_problem(ray.get(checked))
    except ray.exceptions.RayError as error:
        why = str(error).strip().rpartition("\n")[2]
        return f"a node does not answer when its GPU is checked: {why}"


def live_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the live nodes."""
    return [node for node in ray.nodes() if node["Alive"]]
