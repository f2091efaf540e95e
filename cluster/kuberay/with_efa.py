"""Adds EFA to the GPU nodes of a manifest, for nodes of AWS that have it: README.md.

envsubst … < MANIFEST | python cluster/kuberay/with_efa.py --cards 32 | kubectl apply -f -
"""

import argparse
import sys
from typing import Any

import yaml

CARDS = "vpc.amazonaws.com/efa"
GPUS = "nvidia.com/gpu"

ENVIRONMENT = {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "1"}


def with_efa(document: dict[str, Any], cards: int) -> dict[str, Any]:
    """The document of a RayCluster or RayJob, changed: its GPU containers get network cards and
    huge pages.

    No capability: Kubernetes gives one to root alone. What a card reads is locked within the limit
    that the node's container runtime sets (README.md).
    """
    spec = document["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    for group in cluster.get("workerGroupSpecs", []):
        for container in group["template"]["spec"]["containers"]:
            limits = container["resources"]["limits"]
            if GPUS not in limits:
                continue
            added = {CARDS: cards, "hugepages-2Mi": "5120Mi"}
            container["resources"] = {
                kind: {**container["resources"][kind], **added} for kind in ("requests", "limits")
            }
            named = [{"name": name, "value": value} for name, value in ENVIRONMENT.items()]
            container["env"] = [*container.get("env", []), *named]
    return document


def main() -> None:
    """Read documents from stdin, write them with EFA to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cards", type=int, required=True, help="of a node: 32 (p5.48xlarge), 4 (p4de.24xlarge)"
    )
    cards = parser.parse_args().cards
    found = [with_efa(document, cards) for document in yaml.safe_load_all(sys.stdin) if document]
    yaml.safe_dump_all(found, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
