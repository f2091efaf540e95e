"""The Hugging Face hub's client with time limits and retries, and error messages that say what to
do.

huggingface_hub sends some requests, such as the listing of a repository, without any limit: an
address that accepts connections and never answers would be waited for for ever. It repeats some
itself for a few seconds, and gives up on others. A rate limit of the hub lasts up to five minutes.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from rayembed.config.credentials import check_address
from rayembed.errors import AssetError

if TYPE_CHECKING:
    import httpx
    from huggingface_hub import HfApi

LIMITS_SECONDS: Mapping[str, float] = {"connect": 10, "pool": 10, "read": 60, "write": 60}
"""Timeouts in seconds for a connection, and between two bytes of a response. HF_HUB_ETAG_TIMEOUT
and HF_HUB_DOWNLOAD_TIMEOUT change those of downloads (10)."""


def hub_endpoint() -> str | None:
    """Return the current value of `HF_ENDPOINT`; huggingface_hub reads it only on import.

    Raises:
        ConfigError: it holds a password or token.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or None
    check_address(endpoint, "the environment variable HF_ENDPOINT")
    return endpoint


def hub_api() -> "HfApi":
    """Create the hub's API client with request timeouts."""
    from huggingface_hub import HfApi

    limit_hub()
    return HfApi(endpoint=hub_endpoint())


@cache
def limit_hub() -> None:
    """Give every request of huggingface_hub in this process a time limit."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def make() -> "httpx.Client":
        client = default_client_factory()
        client.event_hooks = {"request": [*client.event_hooks["request"], _limit]}
        return client

    set_client_factory(make)


def _limit(request: "httpx.Request") -> None:
    given = request.extensions.get("timeout") or {}
    request.extensions["timeout"] = {
        kind: given.get(kind) or seconds for kind, seconds in LIMITS_SECONDS.items()
    }


def unavailable(reference: str, error: Exception) -> AssetError:
    """Build the error for a reference that cannot be fetched from the hub: the cause, and what to
    do.
    """
    return AssetError(f"cannot fetch {reference!r} from the hub: {_seen(reference, error)}")


def _seen(reference: str, error: Exception) -> str:
    import httpx
    from huggingface_hub import errors

    name = type(error).__name__
    match error:
        case errors.GatedRepoError():
            return (
                f"its owner gives access on request ({name}). Ask for it on its page, and set "
                "HF_TOKEN to the token of the account that has it"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"there is nothing of that name, or it is private ({name}). Check the name; "
                "HF_TOKEN opens private repositories, HF_ENDPOINT names a mirror"
            )
        case errors.RevisionNotFoundError():
            return (
                f"it has no branch, tag or commit of that name ({name}). Check what follows the @"
            )
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "no answer"
            return (
                f"{offline}, and this machine's cache has not got it ({name}). Check the network "
                "and HF_ENDPOINT, which names a mirror, or name a local folder"
            )
        case httpx.TimeoutException():
            limits = f"{LIMITS_SECONDS['connect']:g} s for a connection, {LIMITS_SECONDS['read']:g}"
            return (
                f"no answer in time ({limits} s for an answer; {name}). Check the network, the "
                "proxy and HF_ENDPOINT, which names a mirror"
            )
    said = " ".join(str(error).split())
    return (
        f"{said} ({name}). Check the name, the revision and the network; HF_ENDPOINT names a "
        "mirror, HF_TOKEN opens private repositories"
    )


logger = logging.getLogger(__name__)

T = TypeVar("T")

WAITS_SECONDS: tuple[float, ...] = (2, 4, 8, 16)
"""Seconds between attempts when the hub answers with an error; its client may itself retry each for
up to 25 s."""
TRIES_WITHOUT_ANSWER = 2
"""Number of attempts when the hub does not respond at all, which more often means a wrong address.
"""
LONGEST_WAIT_SECONDS = 300.0
"""Length in seconds of the hub's rate limit window."""

_RESET = re.compile(r";\s*t\s*=\s*(\d+)")


def with_retries(
    call: Callable[[], T],
    what: str,
    *,
    waits: Sequence[float] = WAITS_SECONDS,
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Call `call`, and retry it after HTTP status 429, 408 or 5xx, a timeout or a lost
    connection.

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
            "loading %s failed: %s; attempt %d starts in %g s",
            what, " ".join(str(error).split()), tried + 1, seconds,
        )  # fmt: skip
        del error
        (sleep or time.sleep)(seconds)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _most_tries(error: BaseException, most: int) -> int:
    """Maximum number of attempts for this kind of error; 1 if a retry cannot help."""
    from httpx import NetworkError, RemoteProtocolError, TimeoutException

    if passes(status_of(error)):
        return most
    lost = any(
        isinstance(cause, TimeoutException | NetworkError | RemoteProtocolError)
        for cause in causes_of(error)
    )
    return TRIES_WITHOUT_ANSWER if lost else 1


def passes(status: int) -> bool:
    """Whether an HTTP status means a temporary problem (408, 429 or 5xx)."""
    return status in (408, 429) or status >= 500


def status_of(error: BaseException) -> int:
    """HTTP status that caused the error, preferably a temporary one; 0 if there was none."""
    found = [_status(cause) for cause in causes_of(error)]
    return next((s for s in found if passes(s)), next((s for s in found if s), 0))


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all errors that caused it, which a library's message may omit."""
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
    """HTTP status stored in an error; 0 if it has none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the hub requests to wait, from the header `Retry-After: 30` or `RateLimit:
    "api";r=0;t=30`.
    """
    asked = 0.0
    for cause in causes_of(error):
        headers = getattr(getattr(cause, "response", None), "headers", None) or {}
        after = str(headers.get("Retry-After", ""))
        limit = _RESET.search(str(headers.get("RateLimit", "")))
        asked = max(asked, float(after) if after.isdecimal() else 0.0)
        asked = max(asked, float(limit.group(1)) if limit else 0.0)
    return asked
