"""Errors of Qdrant's client and of its local mode in words, without the API key."""

import contextlib
import sqlite3
from collections.abc import Iterator

import httpx
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ApiException, UnexpectedResponse

from rayembed.errors import ConfigError, RayembedError, StorageError, StorageFullError
from rayembed_extras.indexing.stores.qdrant import QdrantStore

FULL = ("no space left", "out of disk", "disk full", "disk is full")
NO_RIGHT = ("UNAUTHENTICATED", "PERMISSION_DENIED")
"""gRPC's codes of a missing or wrong key."""
WRONG = ("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS")


@contextlib.contextmanager
def translated(what: str, place: str, settings: QdrantStore) -> Iterator[None]:
    """Raise the client's errors as errors of the platform.

    Args:
        what: failed, for the message, such as "counting docs_1".
        place: of the server or folder.
    """
    try:
        yield
    except RayembedError:
        raise
    except (ApiException, QdrantException, httpx.HTTPError, OSError, sqlite3.Error) as error:
        raise _as_error(what, place, settings, error) from None
    except (ValueError, RuntimeError, KeyError) as error:  # of the local mode
        raise _as_error(what, place, settings, error) from None
    except Exception as error:
        if not callable(getattr(error, "details", None)):  # gRPC's have no class of their own
            raise
        raise _as_error(what, place, settings, error) from None


def _as_error(what: str, place: str, settings: QdrantStore, error: Exception) -> RayembedError:
    status = error.status_code if isinstance(error, UnexpectedResponse) else None
    text = settings.without_secrets(_words(error))
    message = f"{place}: {what} failed: {text}"
    if status in (401, 403) or any(code in text for code in NO_RIGHT):
        return ConfigError(
            f"{message}; give an API key that may write by the environment variable "
            f"{settings.key_from}, never in settings"
        )
    if any(words in text.lower() for words in FULL):
        return StorageFullError(f"{message}; free space, then run it again")
    if "already accessed" in text:
        return StorageError(
            f"{place} is open in another process; the local mode allows one at a time: close the "
            "other, or use a server (store.to=http://host:6333)"
        )
    is_refused = status is not None and status < 500 and status not in (408, 429)
    if is_refused or isinstance(error, ValueError | KeyError) or any(c in text for c in WRONG):
        return ConfigError(message)
    return StorageError(f"{message}; check that Qdrant runs there, then run it again")


def _words(error: Exception) -> str:
    """What an error of the client says, in one line."""
    if isinstance(error, UnexpectedResponse):
        try:
            said = error.structured()["status"]["error"]
        except (ValueError, KeyError, TypeError):
            said = error.content[:200].decode(errors="replace")
        return f"{error.status_code} {error.reason_phrase}: {said}"
    source = getattr(error, "source", None)
    details = getattr(error, "details", None)
    if callable(details):
        return f"{getattr(error, 'code')()}: {details()}"  # noqa: B009
    text = str(source or error) or type(source or error).__name__
    return " ".join(text.split())
