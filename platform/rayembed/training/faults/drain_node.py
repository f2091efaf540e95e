"""Command that drains this Ray node before its machine is removed, so that training makes a
checkpoint first.

    python -m rayembed.training.faults.drain_node --seconds 110

is what a pod runs before it is stopped (`preStop` in cluster/kuberay), or a machine when its cloud
gives notice of a spot node's end. It returns when no worker of a training is left on the machine,
or when the time is over; at once where none trains. Imports no Ray and no torch, which would take
seconds of the notice.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROC = Path("/proc")

_POLL_SECONDS = 0.5
_DRAIN_SECONDS = 30.0
"""Seconds until Ray's command must answer; a lost head node never does."""


def drain_node(seconds: int, proc: Path = PROC) -> int:
    """Drain this node; return exit code 0, or 1 if Ray rejected it.

    Args:
        seconds: until the machine goes.
        proc: the processes of this machine, a folder each.
    """
    deadline = time.monotonic() + seconds
    if not trains(proc):
        return 0
    if not drain(seconds, proc):
        return 1
    while trains(proc) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return 0


def trains(proc: Path = PROC) -> bool:
    """Whether any of the processes is a training worker."""
    return any(command[0].startswith("ray::RayTrainWorker") for command in _commands(proc))


def drain(seconds: int, proc: Path = PROC) -> bool:
    """Make Ray drain this machine's node within the given seconds; return whether Ray accepted."""
    raylets = [_options(command) for command in _commands(proc) if _is_raylet(command)]
    if not raylets:
        sys.stderr.write(
            "no raylet runs on this machine, so there is no Ray node whose end could be announced\n"
        )
        return False
    node = raylets[0]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += [f"--address={node['gcs-address']}", f"--node-id={node['node_id']}"]
    command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=it is taken away"]
    command += [f"--deadline-remaining-seconds={seconds}"]
    try:
        subprocess.run(command, check=True, timeout=_DRAIN_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"cannot announce to Ray that this node will stop: {error}\n")
        return False
    return True


def _commands(proc: Path) -> Iterator[list[str]]:
    """Yield the command line of each process of this machine."""
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                text = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it has just ended
                continue
            arguments = text.rstrip("\0").split("\0")
            if arguments[0]:
                yield arguments


def _is_raylet(command: Sequence[str]) -> bool:
    return Path(command[0]).name == "raylet" and "node_id" in _options(command)


def _options(command: Sequence[str]) -> dict[str, str]:
    pairs = (argument.partition("=") for argument in command if argument.startswith("--"))
    return {name.removeprefix("--"): value for name, _, value in pairs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, required=True, help="until the machine goes")
    sys.exit(drain_node(parser.parse_args().seconds))
