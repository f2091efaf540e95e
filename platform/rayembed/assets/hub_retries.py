"""Retries of hub calls after overload or a brief loss of connection.

The hub's client repeats some requests itself for a few seconds, and gives up on others, such as
the listing of a repository. A rate limit of the hub lasts up to five minutes.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAITS_SECONDS: tuple[float, ...] = (2, 4, 8, 16)
"""Seconds between attempts when the hub answers with an error; its client may itself retry each for
up to 25 s."""
TRIES_WITHOUT_ANSWER = 2
"""Attempts when the hub does not answer at all, which more often means a wrong address."""
LONGEST_WAIT_SECONDS = 300.0
"""Window of the hub's rate limits in seconds."""

_RESET = re.compile(r";\s*t\s*=\s*(\d+)")


def with_retries(
    call: Callable[[], T],
    what: str,
    *,
    waits: Sequence[float] = WAITS_SECONDS,
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Result of `call`; retried after 429, 408, 5xx, a timeout or a lost connection.

    Args:
        what: names the call in the log.
        waits: seconds before each further try, longer where the hub asks for it.
        sleep: waits; None: `time.sleep`.

    Raises:
        Exception: of the last try, or the first that trying again does not mend.
    """
    for tried, wait in enumerate([*waits, None], start=1):
        # Outside the handler: an error raised in it would carry the one before along.
        error: Exception
        try:
            return call()
        except Exception as raised:
            if wait is None or tried >= _most_tries(raised, len(waits) + 1):
                raise
            error = raised
        seconds = min(max(wait, _asked_to_wait(error)), LONGEST_WAIT_SECONDS)
        logger.warning(
            "%s: %s; try %d follows in %g s",
            what, " ".join(str(error).split()), tried + 1, seconds,
        )  # fmt: skip
        del error
        (sleep or time.sleep)(seconds)
    raise AssertionError("the last try returns or raises")


def _most_tries(error: BaseException, most: int) -> int:
    """Maximum number of attempts; 1 for permanent errors."""
    from httpx import NetworkError, RemoteProtocolError, TimeoutException

    if passes(status_of(error)):
        return most
    lost = any(
        isinstance(cause, TimeoutException | NetworkError | RemoteProtocolError)
        for cause in causes_of(error)
    )
    return TRIES_WITHOUT_ANSWER if lost else 1


def passes(status: int) -> bool:
    """Whether an HTTP status is transient."""
    return status in (408, 429) or status >= 500


def status_of(error: BaseException) -> int:
    """HTTP status that led to the error, preferably a transient one; 0 without one."""
    found = [_status(cause) for cause in causes_of(error)]
    return next((s for s in found if passes(s)), next((s for s in found if s), 0))


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, including those missing from a library's message."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [cause.__context__, cause.__cause__]


def _status(error: BaseException) -> int:
    """HTTP status in an error; 0 without one."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the hub asks to wait: `Retry-After: 30`, or `RateLimit: "api";r=0;t=30`."""
    asked = 0.0
    for cause in causes_of(error):
        headers = getattr(getattr(cause, "response", None), "headers", None) or {}
        after = str(headers.get("Retry-After", ""))
        limit = _RESET.search(str(headers.get("RateLimit", "")))
        asked = max(asked, float(after) if after.isdecimal() else 0.0)
        asked = max(asked, float(limit.group(1)) if limit else 0.0)
    return asked
