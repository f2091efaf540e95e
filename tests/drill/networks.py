"""Nodes with network cables: each has an address of its own, and can be cut off from all others."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000
BRIDGE = "drill0"
_NET = "10.213.77"
"""A private network that this machine has no other use for; the bridge, and so the head, is .1."""

HEAD = f"{_NET}.1"

DEVICE_OF_GLOO = "GLOO_SOCKET_IFNAME"
"""Variable that names the device of collectives: all nodes have one host name, which says none."""


class SkippedError(Exception):
    """This machine cannot throw the fault; tells why."""


class Cables:
    """A bridge of this machine, and nodes in network namespaces that are plugged into it.

    Raises:
        SkippedError: this user or this machine cannot make them.
    """

    def __init__(self) -> None:
        self._nodes: list[str] = []
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{HEAD}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")

    def plug_in(self) -> str:
        """Add a namespace; its address."""
        number = len(self._nodes) + 2
        name = f"drill{number}"
        _ip("netns", "add", name)
        self._nodes.append(name)
        _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"{name}v", "master", BRIDGE, "up")
        _ip("-n", name, "address", "add", f"{_NET}.{number}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        return f"{_NET}.{number}"

    @contextlib.contextmanager
    def inside(self, address: str) -> Iterator[None]:
        """What this thread starts in the `with` block has the network of that node."""
        before = os.environ[DEVICE_OF_GLOO]
        libc = ctypes.CDLL(None, use_errno=True)
        here, there = Path("/proc/self/ns/net"), Path("/run/netns", _name(address))
        with here.open() as outside, there.open() as inside:
            if libc.setns(inside.fileno(), _CLONE_NEWNET):
                raise SkippedError(f"setns: {os.strerror(ctypes.get_errno())}")
            try:
                os.environ[DEVICE_OF_GLOO] = "eth0"
                yield
            finally:
                os.environ[DEVICE_OF_GLOO] = before
                libc.setns(outside.fileno(), _CLONE_NEWNET)

    def cut(self, address: str) -> None:
        """Pull the node's cable: what is sent from there or to there is lost."""
        _ip("link", "set", f"{_name(address)}v", "down")

    def close(self) -> None:
        """Take everything away."""
        os.environ.pop(DEVICE_OF_GLOO, None)
        for name in self._nodes:
            # A process that is still ending keeps its network, but no cable.
            for words in (("link", "delete", f"{name}v"), ("netns", "delete", name)):
                subprocess.run(["ip", *words], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False, capture_output=True)


@contextlib.contextmanager
def plugged() -> Iterator[Cables]:
    """Cables that are gone after the `with` block."""
    cables = Cables()
    try:
        yield cables
    finally:
        cables.close()


def _name(address: str) -> str:
    return f"drill{address.rpartition('.')[2]}"


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        raise SkippedError("cutting a cable takes the command `ip` (iproute2)") from None
    if done.returncode:
        raise SkippedError(f"ip {' '.join(words)}: {done.stderr.strip()}")
