"""The Pod Security Standards of Kubernetes as a table: what `baseline` and `restricted` refuse.

By kubernetes.io/docs/concepts/security/pod-security-standards, for pods of Linux.
"""

from collections.abc import Callable, Iterator
from typing import Any

LEVELS = ("privileged", "baseline", "restricted")

_BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range"),
    *("net.ipv4.ip_unprivileged_port_start", "net.ipv4.tcp_syncookies"),
    *("net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout"),
    *("net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes"),
}
_SELINUX = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret", "name"),
}
_PROFILES = {"RuntimeDefault", "Localhost"}

Rule = Callable[[dict[str, Any], dict[str, Any]], bool]
"""Takes a container and its security context as it is in force; whether it is refused."""

_BASELINE: dict[str, Rule] = {
    "privileged": lambda _, c: bool(c.get("privileged")),
    "capabilities": lambda _, c: bool(_added(c) - _BASELINE_CAPABILITIES),
    "hostPort": lambda box, _: any(port.get("hostPort") for port in box.get("ports", [])),
    "procMount": lambda _, c: c.get("procMount", "Default") != "Default",
    "seccompProfile": lambda _, c: c.get("seccompProfile", {}).get("type") == "Unconfined",
    "appArmorProfile": lambda _, c: c.get("appArmorProfile", {}).get("type") == "Unconfined",
    "seLinuxOptions": lambda _, c: _selinux(c.get("seLinuxOptions", {})),
    "windowsOptions": lambda _, c: bool(c.get("windowsOptions", {}).get("hostProcess")),
    "probe host": lambda box, _: any(map(_has_host, _handlers(box))),
}
_RESTRICTED: dict[str, Rule] = {
    "capabilities": lambda _, c: bool(
        _added(c) - {"NET_BIND_SERVICE"} or "ALL" not in c.get("capabilities", {}).get("drop", [])
    ),
    "allowPrivilegeEscalation": lambda _, c: c.get("allowPrivilegeEscalation") is not False,
    "runAsNonRoot": lambda _, c: c.get("runAsNonRoot") is not True,
    "runAsUser": lambda _, c: c.get("runAsUser") == 0,
    "seccompProfile": lambda _, c: c.get("seccompProfile", {}).get("type") not in _PROFILES,
}


def refusals(pod: dict[str, Any], level: str) -> list[str]:
    """What a namespace that enforces the level refuses a pod's spec for; empty: it is admitted."""
    if level == "privileged":
        return []
    found = list(_of_pod(pod, level))
    rules = list(_BASELINE.items()) + (list(_RESTRICTED.items()) if level == "restricted" else [])
    shared = pod.get("securityContext", {})
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in pod.get(kind, []):
            context = {**shared, **container.get("securityContext", {})}
            name = container["name"]
            found += [f"{name}: {what}" for what, refuses in rules if refuses(container, context)]
    return list(dict.fromkeys(found))


def _of_pod(pod: dict[str, Any], level: str) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    volumes = pod.get("volumes", [])
    if any("hostPath" in volume for volume in volumes):
        yield "hostPath"
    if level == "restricted" and any(set(volume) - _VOLUMES for volume in volumes):
        yield "volumes"
    sysctls = pod.get("securityContext", {}).get("sysctls", [])
    if any(one["name"] not in _SYSCTLS for one in sysctls):
        yield "sysctls"


def _added(context: dict[str, Any]) -> set[str]:
    return set(context.get("capabilities", {}).get("add", []))


def _selinux(options: dict[str, Any]) -> bool:
    return options.get("type") not in _SELINUX or bool(options.get("user") or options.get("role"))


def _handlers(container: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        yield container.get(name, {})
    for name in ("postStart", "preStop"):
        yield container.get("lifecycle", {}).get(name, {})


def _has_host(handler: dict[str, Any]) -> bool:
    return any(handler.get(kind, {}).get("host") for kind in ("httpGet", "tcpSocket"))
