"""Fits the GPU nodes of a manifest to a cluster: their runtime class, and pods near each other.

envsubst … < MANIFEST | python cluster/kuberay/with_nodes.py --runtime-class nvidia | kubectl …
"""

import argparse
import sys
from typing import Any

import yaml

GPUS = "nvidia.com/gpu"

CLUSTER = "rayembed/cluster"
"""Label of GPU pods that shall be near each other; KubeRay keeps a template's labels."""


def with_nodes(
    document: dict[str, Any], runtime_class: str | None = None, near: str | None = None
) -> dict[str, Any]:
    """The document of a RayCluster or RayJob, changed: its GPU pods name a runtime class, and
    prefer nodes that share the value of a label with each other's.

    Args:
        runtime_class: of containers with GPUs; None: the node's own.
        near: label of nodes, such as topology.kubernetes.io/zone or one of racks; None: anywhere.
    """
    spec, name = document["spec"], document["metadata"]["name"]
    for group in spec.get("rayClusterSpec", spec).get("workerGroupSpecs", []):
        pod = group["template"]["spec"]
        if not any(GPUS in c["resources"]["limits"] for c in pod["containers"]):
            continue
        if runtime_class is not None:
            pod["runtimeClassName"] = runtime_class
        if near is not None:
            # KubeRay's own label cannot be known here: the cluster of a RayJob gets another name.
            labels = {CLUSTER: name}
            metadata = group["template"].setdefault("metadata", {})
            metadata["labels"] = {**metadata.get("labels", {}), **labels}
            term = {"topologyKey": near, "labelSelector": {"matchLabels": labels}}
            preferred = [{"weight": 100, "podAffinityTerm": term}]
            affinity = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
            pod["affinity"] = {**pod.get("affinity", {}), "podAffinity": affinity}
    return document


def main() -> None:
    """Read documents from stdin, write them for the cluster's nodes to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime-class", help="nvidia, where the nodes' default is another one")
    parser.add_argument("--near", help="label of nodes whose value a run's pods shall share")
    asked = parser.parse_args()
    found = [
        with_nodes(document, asked.runtime_class, asked.near)
        for document in yaml.safe_load_all(sys.stdin)
        if document
    ]
    yaml.safe_dump_all(found, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
