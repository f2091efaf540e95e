"""The network that NCCL takes, as it logs it when the workers first reduce something."""

import logging
import os
import re
from pathlib import Path

from rayembed.training.trainer import Callback, StepRecord

logger = logging.getLogger(__name__)

MOST_OF_NODE = 8
"""Workers that one machine holds as a rule; more of them speak over a network."""

_TALKATIVE = {"INFO", "TRACE", "ABORT"}

_USING = re.compile(r"NCCL INFO Using network (\S.*?)\s*$", re.MULTILINE)
_CHANNEL = re.compile(r"\bvia NET/([^/\n]+)/\d+")
_ADDRESS = re.compile(r"NET/Socket : Using (.+?)\s*$", re.MULTILINE)


def log_nccl(folder: str) -> Path | None:
    """Let NCCL write its choice of network to a file of this process; the file.

    Must be called before the first collective. None where the user has NCCL log already, to the
    worker's output or to a file of their own; rank 0's warnings go to the file as well.
    """
    if "NCCL_DEBUG_FILE" in os.environ or os.environ.get("NCCL_DEBUG", "") in _TALKATIVE:
        return None
    file = Path(folder) / f"rayembed-nccl-{os.getpid()}.log"
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    os.environ["NCCL_DEBUG_FILE"] = str(file)
    return file


def networks_in(text: str) -> list[str]:
    """Return the networks that NCCL's log names, by its names (`Socket`, `IB`, `AWS Libfabric`).

    Those of channels between workers, else the one that it chose; empty where the log has neither.
    """
    return sorted(set(_CHANNEL.findall(text))) or sorted(set(_USING.findall(text)))


class TransportLog(Callback):
    """Logs after the first step by which network the workers reduced, and warns of TCP.

    Args:
        file: that NCCL writes to.
        workers: number of all workers.
        several_nodes: whether they are on more than one.
    """

    def __init__(self, file: Path, workers: int, *, several_nodes: bool) -> None:
        self._file, self._workers, self._several_nodes = file, workers, several_nodes
        self._is_done = False

    def on_step_end(self, record: StepRecord) -> None:
        """Read NCCL's file once."""
        if self._is_done:
            return
        self._is_done = True
        try:
            text = self._file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            logger.warning("NCCL's choice of network is not known: %s", error)
            return
        networks = networks_in(text)
        if "Socket" in networks and (self._several_nodes or self._workers > MOST_OF_NODE):
            addresses = ", ".join(dict.fromkeys(_ADDRESS.findall(text))) or "unknown interfaces"
            logger.warning(
                "NCCL sends between %d workers over TCP (NET/Socket, %s): several nodes may spend "
                "as long sending as computing. If they have a faster network (EFA, InfiniBand), "
                "its plugin is missing or memory cannot be locked; docs/operations.md. NCCL's own "
                "log: %s",
                *(self._workers, addresses, self._file),
            )
        elif not networks and self._several_nodes:
            logger.warning(
                "NCCL's choice of network is not known: workers are on several nodes, and its log "
                "names no network (NCCL_DEBUG_SUBSYS must have INIT and NET): %s",
                self._file,
            )
        else:
            named = ", ".join(f"NET/{name}" for name in networks) or "no network: within one node"
            logger.info("NCCL's transport: %s (%s)", named, self._file)
