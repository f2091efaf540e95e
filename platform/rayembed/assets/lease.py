"""A lease in storage that lets only one job at a time work on a run, on any machine.

A lock of the operating system ends with its process but holds on one machine alone. Here each job
has a claim, a small file of its own in a folder of the storage, and has the lease when it wrote its
claim, listed the folder afterwards and saw no other. Whoever wrote later sees the earlier claim, so
two never have it, and no conditional writes are needed, which pyarrow does not offer; S3, GCS and
file systems list what was written before. A job that sees another's claim takes its own away again.

The holder rewrites its claim every `RENEWAL_SECONDS`. One that was not renewed for
`LEASE_SECONDS`, by the clock of the storage, is over, and the next job removes it. A holder that
could not renew (its machine slept, the storage was away) goes on if its claim is still there. If
another job has removed it, the holder is ended at the next renewal, whether the other has the lease
now or has come to its end: both may have been at work for so long.
"""

import json
import logging
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rayembed.assets.storage import file_times, join, read_bytes, remove_file, write_atomic
from rayembed.errors import ArtifactError, StorageError

logger = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
"""Seconds without renewal after which a claim expires: longer than a busy storage takes for a
write, shorter than a cluster takes to start another head."""

RENEWAL_SECONDS = 10.0
"""Seconds between two renewals."""

_LOOK_SECONDS = 2.0
"""Seconds between two checks of another job's claim."""

_ENDING = ".claim"


@dataclass(frozen=True)
class Claim:
    """Content of a claim file, by which a job requests or holds a lease: machine, process
    and time.
    """

    machine: str
    """Identifier of the machine; processes with the same one share an operating system lock, held
    by the caller."""
    host: str
    process: int
    since: str
    """Start time in UTC."""
    held_from: int | None = None
    """Storage time in ns at which the lease was taken; None: only requested so far."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


def this_machine(lock: Path) -> str:
    """Identifier of the host, boot, mounts and lock path; two processes have the same one only if
    they share the lock file.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        mounts = Path("/proc/self/ns/mnt").readlink().name
    except OSError:  # not Linux
        boot = mounts = ""
    return "|".join([socket.gethostname(), boot, mounts, str(lock.absolute())])


def end_this_process(message: str) -> None:
    """End the process at once, without another write to storage; the default when a lease
    is lost.

    On Ray the workers end with their driver.
    """
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(1)


ADVICE = "wait for it, stop it (`ray job stop`), or give this one another --name"
"""What a user can do whose job may have another name."""


class Lease:
    """Exclusive lease on a folder in storage, held and renewed inside a `with` block.

    Args:
        folder: of the claims alone.
        what: what a job with the lease does, after `another job `.
        machine: of `this_machine`; claims of the same one are over, because the caller holds a lock
            there that they had.
        wait: for the job that has it, instead of refusing.
        advice: what the refused job's user can do.
        on_lost: is given a message when another job took the lease, in a thread of its own.

    Raises:
        ArtifactError: on entry, another job has it and renews it; the message says which.
        StorageError: on entry, the storage does not answer.
    """

    def __init__(
        self,
        folder: str,
        what: str,
        machine: str,
        *,
        wait: bool = False,
        advice: str = ADVICE,
        on_lost: Callable[[str], None] = end_this_process,
    ) -> None:
        self._folder, self._what, self._wait, self._on_lost = folder, what, wait, on_lost
        self._advice = advice
        self._name = uuid.uuid4().hex + _ENDING
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._claim = Claim(machine, socket.gethostname(), os.getpid(), since)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        try:
            self._claim = replace(self._claim, held_from=self._taken())
            self._write()
        except BaseException:
            self._withdraw()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._withdraw()

    def _taken(self) -> int:
        """Wait until no other job has a live claim; return the storage time in ns of this job's
        claim.
        """
        seen: dict[str, int] = {}
        told = False
        while True:
            self._write()
            times, others = self._others()
            if not others:
                return times[self._name]
            self._withdraw()
            name, other = next(iter(others.items()))
            if other.held_from is not None:
                if seen.setdefault(name, times[name]) != times[name] and not self._wait:
                    raise ArtifactError(refused(self._what, self._folder, other, self._advice))
                if not told:
                    logger.info(
                        "another job %s (%s): %s",
                        *(self._what, other),
                        "waiting until it ends"
                        if self._wait
                        else f"checking for at most {LEASE_SECONDS:g} s whether it is alive",
                    )
                    told = True
            # Two that ask at the same time both step back, and come again at other times.
            time.sleep(_LOOK_SECONDS * random.uniform(0.5, 1.5))

    def _others(self) -> tuple[Mapping[str, int], dict[str, Claim]]:
        """Return the timestamps of all claims, and the live claims of other jobs; delete expired
        claims.
        """
        times = self._times()
        now = times[self._name]
        others = {}
        for name, written in times.items():
            claim = None if name == self._name else _read(join(self._folder, name))
            if claim is None:
                continue
            is_over = now - written >= LEASE_SECONDS * 1e9
            if is_over or claim.machine == self._claim.machine:
                _remove(join(self._folder, name))
            else:
                others[name] = claim
        return times, others

    def _times(self) -> Mapping[str, int]:
        """Map each claim file to its time of writing, in ns of the storage's clock."""
        found = file_times(self._folder)
        return {name: time for name, time in found.items() if name.endswith(_ENDING)}

    def _renew(self) -> None:
        away_since: float | None = None
        while not self._ended.wait(RENEWAL_SECONDS):
            try:
                # Looked for first: written again, a claim that another job removed would be back.
                gone = self._name not in self._times()
                if not gone:
                    self._write()
                other = self._taken_by()
            except ArtifactError as error:
                if away_since is None:
                    away_since = time.monotonic()
                    logger.warning(
                        "cannot renew this job's lock in %s, trying again: %s",
                        *(self._folder, error),
                    )
                continue
            if away_since is not None:
                seconds = time.monotonic() - away_since
                logger.warning(
                    "renewed this job's lock in %s again, after %.0f s without a renewal",
                    *(self._folder, seconds),
                )
                away_since = None
            if other is not None or gone:
                self._withdraw()
                taken = (
                    "another job has taken the lock and released it, or the lock file was removed. "
                    "This one ends here and writes nothing more; the same command goes on from the "
                    "last checkpoint"
                    if other is None
                    else f"another job {self._what} now ({other}). This one ends here and writes "
                    "nothing more; the other goes on from the last checkpoint"
                )
                self._on_lost(
                    f"this job has lost its lock in {self._folder!r}: it did not renew the lock "
                    f"for {LEASE_SECONDS:g} s, and {taken}"
                )
                return

    def _taken_by(self) -> Claim | None:
        """Return the claim of a job that took over the lease after this job; normally None."""
        for name in self._times():
            claim = None if name == self._name else _read(join(self._folder, name))
            if claim is not None and (claim.held_from or 0) > (self._claim.held_from or 0):
                return claim
        return None

    def _write(self) -> None:
        text = json.dumps(asdict(self._claim), indent=1) + "\n"
        write_atomic(join(self._folder, self._name), text.encode())

    def _withdraw(self) -> None:
        _remove(join(self._folder, self._name))


def holder(folder: str) -> Claim | None:
    """Return the claim of the job that holds the lease, or that ended without releasing it; None if
    the lease is free.

    Raises:
        StorageError: the storage cannot be read.
    """
    for name in sorted(file_times(folder)):
        claim = _read(join(folder, name)) if name.endswith(_ENDING) else None
        if claim is not None and claim.held_from is not None:
            return claim
    return None


def refused(what: str, place: str, other: Claim | None, advice: str) -> str:
    """Build the error message for a job that needs a lease while another job holds it."""
    who = "" if other is None else f" ({other})"
    return f"another job {what} in {place!r} right now{who}; {advice}"


def _read(path: str) -> Claim | None:
    """Read a claim file; None if it has been removed meanwhile.

    One that this version cannot read is another's: a later version may write it.
    """
    try:
        content = read_bytes(path)
    except StorageError:
        raise
    except ArtifactError:
        return None
    try:
        told = json.loads(content)
        held_from = told.get("held_from")
        return Claim(
            machine=str(told["machine"]),
            host=str(told["host"]),
            process=int(told["process"]),
            since=str(told["since"]),
            held_from=None if held_from is None else int(held_from),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Claim("", "a machine that is not named", 0, "a time that is not named", held_from=0)


def _remove(path: str) -> None:
    try:
        remove_file(path)
    except StorageError:
        # Gone already, or the storage is away: a claim that stays is over after a while.
        logger.debug("cannot remove the lock file %s", path)
