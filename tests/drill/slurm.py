"""A Slurm cluster of Debian's packages on this machine.

A controller, and nodes that have a network, processes, a host name and a /tmp of their own, and
share all other files.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from networks import DEVICE_OF_GLOO, HEAD, Cables, SkippedError

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare")
WHERE = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")

CONFIGURATION = """
ClusterName=drill
SlurmctldHost=controller({head})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
CGROUP = "CgroupMountpoint={folder}/cgroup\nCgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n"

NODE = r"""
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs {folder}/cgroup
for controller in freezer cpuset memory; do
  mkdir {folder}/cgroup/$controller
  mount -t cgroup -o $controller none {folder}/cgroup/$controller
done
exec slurmd -D -N {name}
"""


class Slurm:
    """The cluster, for the `with` block of `slurm`."""

    def __init__(self, folder: Path, cables: Cables, names: tuple[str, ...]) -> None:
        self.folder, self._cables = folder, cables
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.addresses = {name: cables.plug_in() for name in names}
        (folder / "cgroup").mkdir()
        lines = (
            f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=8000"
            for name, address in self.addresses.items()
        )
        filled = {"head": HEAD, "folder": folder, "nodes": "\n".join(lines)}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**filled))
        (folder / "cgroup.conf").write_text(CGROUP.format(**filled))
        known = {"localhost": "127.0.0.1", "controller": HEAD, **self.addresses}
        (folder / "hosts").write_text("".join(f"{a} {name}\n" for name, a in known.items()))
        # A node's host name leads to its device.
        inherited = {k: v for k, v in os.environ.items() if k != DEVICE_OF_GLOO}
        self.environment = {
            **inherited,
            "PATH": os.pathsep.join([os.environ["PATH"], *WHERE]),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def start(self) -> None:
        """Start authentication, the controller and all nodes, and wait until these are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        places = [
            f"--{option}={self.folder}/munge.{option.removesuffix('-file')}"
            for option in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *places)
        self._daemon("unshare", "--uts", "sh", "-c", "hostname controller; exec slurmctld -D")
        for name in self.addresses:
            self.start_node(name)
        self.wait_for_nodes()

    def start_node(self, name: str) -> None:
        """Start a node; one that was killed joins again."""
        script = NODE.format(folder=self.folder, name=name)
        own = ("--uts", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child")
        with self._cables.inside(self.addresses[name]):
            self._nodes[name] = self._started("unshare", *own, "sh", "-ec", script)

    def kill_node(self, name: str) -> None:
        """End all processes of a node at once."""
        self._nodes[name].kill()
        self._nodes[name].wait()

    def wait_for_nodes(self, seconds: float = 60) -> None:
        """Wait until all nodes take jobs."""
        deadline = time.monotonic() + seconds
        while (states := self.told("sinfo", "-h", "-N", "-o", "%t").split()) != ["idle"] * len(
            self.addresses
        ):
            assert time.monotonic() < deadline, (states, self.logs())
            time.sleep(0.5)

    def told(self, *command: str, **more: str) -> str:
        """What a command of Slurm prints; `more` is added to its environment."""
        environment: Mapping[str, str] = {**self.environment, **more}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr, self.logs())
        return done.stdout

    def state(self, job: str) -> str:
        """State of a job: `RUNNING`, `PENDING`, `COMPLETED`, …"""
        shown = self.told("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def logs(self) -> str:
        """Ends of the daemons' logs."""
        return "\n".join(p.read_text()[-1500:] for p in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """End everything."""
        for process in (*self._nodes.values(), *reversed(self._daemons)):
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _daemon(self, *command: str) -> None:
        self._daemons.append(self._started(*command))

    def _started(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


@contextlib.contextmanager
def slurm(folder: Path, cables: Cables, names: tuple[str, ...]) -> Iterator[Slurm]:
    """A running cluster.

    Raises:
        SkippedError: a program is not installed, or this user is not root.
    """
    found = os.pathsep.join([os.environ["PATH"], *WHERE])
    missing = [name for name in PROGRAMS if shutil.which(name, path=found) is None]
    if missing:
        raise SkippedError(f"no {', '.join(missing)}: apt-get install munge slurmctld slurmd")
    cluster = Slurm(folder, cables, names)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
