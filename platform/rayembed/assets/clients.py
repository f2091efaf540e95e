"""Object storage clients with bounded waiting times, cached by process and bucket.

pyarrow's own would try a server that accepts connections and never answers for 100 seconds.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import parse_qs

import pyarrow.fs

T = TypeVar("T")

_OF_ENVIRONMENT = ("AWS_", "GOOGLE_", "CLOUDSDK_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Prefixes of environment variables that affect a client."""

_LOST = {"tls_verify_certificates", "tls_ca_dir_path", "smart_defaults"}
"""Options of an address that a client does not return."""


@dataclass(frozen=True)
class Patience:
    """Limits on connection time, waiting time and attempts for object storage that does not
    answer.
    """

    connect_seconds: float = 10
    answer_seconds: float = 10
    """Seconds without a byte until a request fails."""
    tries: int = 4
    """Number of attempts of a request, with doubling pauses of up to 1, 2 and 4 seconds."""
    gcs_seconds: float = 60
    """Total seconds of attempts for Google's storage, whose client has no attempt limit."""


PATIENCE = Patience()
"""Default limits. Measured: an S3 request without answer fails after 45 seconds, a small upload,
which curl sends late, after 71. An unreachable Google storage fails after `gcs_seconds`, a silent
one after the 120 seconds of its client, which pyarrow cannot change."""


_FIRST_PAUSE = 0.25
"""Seconds until a read is first retried."""

_UNANSWERED = (
    "AWS Error NETWORK_CONNECTION",
    "google::cloud::Status(UNAVAILABLE",
    "google::cloud::Status(DEADLINE_EXCEEDED",
)
"""Texts in Arrow's errors that indicate a missing response; it has no other sign."""

_MISTAKEN = "Failed to flush response stream"
"""Text of Arrow's error where the response was longer than requested, as from a server that is too
busy: its client sees no status then, and does not ask again."""


_MOST_USES = 100
"""Number of uses after which a client is replaced by a new one. AWS's client has 100 tries beyond
the first in all, and gets one back for each success, of which Arrow never tells it: then it fails
at every answer of a busy server. Measured with 30 % of requests failing and four tries: 2 of 260
looks failed before 103 requests had, then each that the server refused, 44 of 140."""


_OPTIONS = re.compile(r"\?\w+=[^?]*\Z")
"""End of an address with options, such as `?region=…`; a key may have question marks as well."""


_making: dict[int, threading.Lock] = {}
"""Lock of each process; that of a parent may be held when it forks."""


def split_options(address: str) -> tuple[str, str]:
    """Split an address into the part before `?` and its options including `?`, empty without
    options.
    """
    found = _OPTIONS.search(address)
    return (address, "") if found is None else (address[: found.start()], found.group())


def split_address(address: str) -> tuple[str, str]:
    """Split an address into the bucket's address with all options, and the path for its
    filesystem.

    A key is the one that stands there, as for other tools: `%20` is no space.
    """
    base, options = split_options(address)
    scheme, _, place = base.partition("://")
    bucket, _, key = place.partition("/")
    root = f"{scheme}://{f'{bucket}/' if bucket else place}{options}"
    return root, f"{bucket.rpartition('@')[2]}/{key}".rstrip("/")


def connect(address: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the filesystem of an `s3://` or `gs://` address, and the path within it.

    A client serves all addresses of a bucket in this process a number of times, as long as the
    environment is the same: a new one costs 20 ms and its connections.

    Raises:
        pyarrow.ArrowException, OSError, ValueError: pyarrow cannot open it.
    """
    root, inside = split_address(address)
    environment = tuple(
        sorted(item for item in os.environ.items() if item[0].upper().startswith(_OF_ENVIRONMENT))
    )
    # A forked child must not use its parent's connections. Threads that begin together would
    # otherwise make one each.
    process = os.getpid()
    with _making.setdefault(process, threading.Lock()):
        filesystem = _client(root, environment, process, PATIENCE).used()
    return filesystem, inside


class _Client:
    """Holder of a filesystem, which it creates again after a fixed number of uses."""

    def __init__(self, make: Callable[[], pyarrow.fs.FileSystem]) -> None:
        self._make, self._filesystem, self._left = make, make(), _MOST_USES

    def used(self) -> pyarrow.fs.FileSystem:
        """Count one use and return the filesystem; filesystems returned earlier stay valid."""
        if not self._left:
            self._filesystem, self._left = self._make(), _MOST_USES
        self._left -= 1
        return self._filesystem


@lru_cache(maxsize=64)
def _client(
    root: str, _environment: tuple[tuple[str, str], ...], _process: int, patience: Patience
) -> _Client:
    found, _ = pyarrow.fs.FileSystem.from_uri(root)
    if _LOST & parse_qs(root.partition("?")[2]).keys():
        return _Client(lambda: found)
    # Its pickle tells what pyarrow read out of the address and the environment.
    make, (options,) = found.__reduce__()
    limited = {**options, **_limits(found, patience)}
    return _Client(lambda: make(dict(limited)))


def _limits(filesystem: pyarrow.fs.FileSystem, patience: Patience) -> dict[str, Any]:
    if isinstance(filesystem, pyarrow.fs.GcsFileSystem):
        return {"retry_time_limit": timedelta(seconds=patience.gcs_seconds)}
    return {
        "connect_timeout": patience.connect_seconds,
        "request_timeout": patience.answer_seconds,
        "retry_strategy": pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=patience.tries),
        # A small file is then one request in place of three, made when it is complete.
        "allow_delayed_open": True,
    }


def read_with_retries(read: Callable[[], T]) -> T:
    """Retry a read with doubling pauses while object storage reports that it is too busy.

    Raises:
        OSError: what the last try raises.
    """
    for attempt in range(PATIENCE.tries - 1):
        try:
            return read()
        except OSError as error:
            if _MISTAKEN not in str(error):
                raise
        time.sleep(_FIRST_PAUSE * 2**attempt)
    return read()


def is_unanswered(error: BaseException) -> bool:
    """Whether an error means that object storage was unreachable or did not answer in time."""
    return any(status in str(error) for status in _UNANSWERED)


def why(error: BaseException) -> str:
    """Text of a storage error; if the storage did not answer, with the number of attempts and their
    time limit.
    """
    if not is_unanswered(error):
        return str(error)
    tries, seconds = PATIENCE.tries, PATIENCE.answer_seconds
    asked = f": asked {tries} times, {seconds:g} s each" if _UNANSWERED[0] in str(error) else ""
    return f"{error} (the storage does not answer{asked})"
