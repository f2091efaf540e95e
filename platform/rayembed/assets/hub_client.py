"""The hub's client with time limits, and its errors in words that say what to do.

huggingface_hub sends some requests, such as the listing of a repository, without any limit: an
address that accepts connections and never answers would be waited for for ever.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from rayembed.config.credentials import check_address
from rayembed.errors import AssetError

if TYPE_CHECKING:
    import httpx
    from huggingface_hub import HfApi

LIMITS_SECONDS: Mapping[str, float] = {"connect": 10, "pool": 10, "read": 60, "write": 60}
"""Seconds until a connection, and between two bytes of an answer. HF_HUB_ETAG_TIMEOUT and
HF_HUB_DOWNLOAD_TIMEOUT change those of downloads (10)."""


def hub_endpoint() -> str | None:
    """Current value of `HF_ENDPOINT`; huggingface_hub reads it only on import.

    Raises:
        ConfigError: it holds a password or token.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or None
    check_address(endpoint, "the environment variable HF_ENDPOINT")
    return endpoint


def hub_api() -> "HfApi":
    """The hub's interface, whose requests end in time."""
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
    """Error for a hub that did not deliver a reference: what was seen, and what to do."""
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
