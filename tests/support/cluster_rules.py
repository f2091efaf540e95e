"""What we ask of manifests beyond validity: tokens, users, secrets, pins. Problems as text."""

import re
from collections.abc import Iterator
from typing import Any

_SECRET = re.compile(r"PASSW|TOKEN|SECRET|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_HEAD_GIGABYTES = 128
_PINNED = re.compile(r"^(\$\{IMAGE(_CPU)?\}|[^:@\s]+(:[0-9][\w.-]*|@sha256:[0-9a-f]{64}))$")


def pod_problems(where: str, template: dict[str, Any]) -> list[str]:
    """Of one pod template."""
    spec = template["spec"]
    found = list(_pod_user(spec))
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        found += _container(container)
    if spec.get("hostNetwork") or spec.get("hostPID") or spec.get("hostIPC"):
        found.append("shares a namespace with its node")
    if any("hostPath" in volume for volume in spec.get("volumes", [])):
        found.append("mounts a folder of its node")
    if "automountServiceAccountToken" not in spec:
        found.append("does not say whether it has a token of Kubernetes")
    if not template["metadata"]["labels"].get("app.kubernetes.io/component"):
        found.append("has no component by which network policies know it")
    return [f"{where}: {problem}" for problem in found]


def _pod_user(spec: dict[str, Any]) -> Iterator[str]:
    context = spec.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield "may run as root"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "has no seccomp profile"


def _container(container: dict[str, Any]) -> Iterator[str]:
    name, context = container["name"], container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield f"{name} may gain privileges"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{name} keeps capabilities"
    if not _PINNED.match(container["image"]):
        yield f"{name} has the image {container['image']!r}, which is not pinned"
    for variable in container.get("env", []):
        if _SECRET.search(variable["name"]) and "value" in variable:
            yield f"{name} has {variable['name']} in clear text"
    resources = container.get("resources", {})
    if not resources.get("limits", {}).get("memory"):
        yield f"{name} has no limit of memory"
    key = "nvidia.com/gpu"
    if resources.get("requests", {}).get(key) != resources.get("limits", {}).get(key):
        yield f"{name} requests other GPUs than its limit"


def cluster_problems(spec: dict[str, Any], *, operator_asks: bool) -> list[str]:
    """Of a RayCluster's spec.

    Args:
        operator_asks: whether it is a RayJob's: the operator reads the dashboard, which then is not
            on loopback, and starts the job anew when its head is lost.
    """
    found = []
    if spec.get("authOptions", {}).get("mode") != "token":
        found.append("takes everybody: authOptions.mode is not token")
    head = spec["headGroupSpec"]
    if head.get("serviceType", "ClusterIP") != "ClusterIP" or head.get("enableIngress"):
        found.append("the head is reached from outside")
    wanted = "0.0.0.0" if operator_asks else "127.0.0.1"
    if head["rayStartParams"].get("dashboard-host") != wanted:
        found.append(f"the dashboard's host is not {wanted}")
    if head["rayStartParams"].get("num-cpus") != "0":
        found.append("tasks may run on the head, beside its state")
    state = spec.get("gcsFaultToleranceOptions")
    if state is None and not operator_asks:
        found.append("what runs on a cluster that stays is lost with its head")
    if "value" in (state or {}).get("redisPassword", {}):
        found.append("Redis' password stands in clear text")
    if not spec.get("enableInTreeAutoscaling"):
        found.append("nodes stay when there is no work")
    groups = [("head", head), *((g["groupName"], g) for g in spec["workerGroupSpecs"])]
    for name, group in groups:
        found += pod_problems(name, group["template"])
        mounts = group["template"]["spec"]["containers"][0].get("volumeMounts", [])
        if not any(mount["mountPath"] == "/dev/shm" for mount in mounts):
            found.append(f"{name}: /dev/shm is too small for Ray's object store")
        spill = group["rayStartParams"].get("object-spilling-directory")
        if spill is None or spill not in {mount["mountPath"] for mount in mounts}:
            found.append(f"{name}: spills into its container, not onto a volume")
    memory = head["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    if not memory.endswith("Gi") or int(memory[:-2]) < _HEAD_GIGABYTES:
        found.append("the head is too small for a driver that orders a plan of 1e9 rows")
    return found


def policy_problems(policies: list[dict[str, Any]], components: set[str]) -> list[str]:
    """Of all network policies together.

    Args:
        components: of the pods that there are.
    """
    found = []
    denies = [p for p in policies if p["spec"]["podSelector"] == {}]
    if not any(
        sorted(p["spec"]["policyTypes"]) == ["Egress", "Ingress"]
        and "ingress" not in p["spec"]
        and "egress" not in p["spec"]
        for p in denies
    ):
        found.append("what no policy allows is not denied")
    own = [p["spec"] for p in policies if p["spec"]["podSelector"] != {}]
    known = {s["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for s in own}
    found += [f"no policy is for {name}" for name in sorted(components - known)]
    found += [f"the policy for {name} is for no pod" for name in sorted(known - components)]
    for spec in own:
        for rule in spec.get("ingress", []):
            if not rule.get("from"):
                found.append("somebody is let in from everywhere")
            found += [
                "somebody is let in from addresses, not from pods"
                for source in rule.get("from", [])
                if "podSelector" not in source
            ]
        for rule in spec.get("egress", []):
            outside = [to["ipBlock"] for to in rule.get("to", [{}]) if "ipBlock" in to]
            if not rule.get("to"):
                found.append("everything may be asked")
            for block in outside:
                if "169.254.0.0/16" not in block.get("except", []):
                    found.append("the cloud's metadata service may be asked")
                if not rule.get("ports"):
                    found.append("every port outside may be asked")
    return found
