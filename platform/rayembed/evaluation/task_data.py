"""The data of a task from the hub: what passes is waited out, what stays is told in our words.

`huggingface_hub` repeats a request five times when the hub is asked too often (429) or has an error
of its own, and waits as long as the hub's answer says. What is left after that is repeated here,
with longer waits: the limits are counted over five minutes, and many runners share one address.
`datasets` hides the cause of its errors, often behind a "couldn't find any data file"; it is looked
for in the chain of causes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import datasets.exceptions
import httpx
from huggingface_hub import is_offline_mode

from rayembed.assets.hub_retries import causes_of, passes, status_of, with_retries
from rayembed.errors import AssetError

WAITS_SECONDS: tuple[float, ...] = (15, 60, 240)
"""Between the attempts at one task's data."""

_TOO_MANY = 429
_LOADING = (
    OSError,  # no such repository, file or revision; not reached; the hub's HTTP errors
    httpx.HTTPError,
    ValueError,  # no such configuration or split; not in the cache of a machine that is offline
    KeyError,
    RuntimeError,  # a repository with a loading script
    datasets.exceptions.DatasetsError,
)


def load_data(
    task: Any,
    *,
    waits: Sequence[float] = WAITS_SECONDS,
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Load the data of a fresh mteb task, which `mteb.evaluate` then leaves loaded.

    Args:
        waits: seconds before each further attempt, where the hub is asked too often or is down;
            longer where its answer says so.

    Raises:
        AssetError: the data cannot be had; names the task, the reason and what to do.
    """
    try:
        with_retries(task.load_data, task.metadata.name, waits=waits, sleep=sleep)
    except _LOADING as error:
        raise unavailable_data(task, error) from error


def unavailable_data(task: Any, error: BaseException) -> AssetError:
    """Error for a task whose data mteb could not load."""
    name, where = task.metadata.name, task.metadata.dataset
    reason, advice = _told(error)
    return AssetError(
        f"the data of the task {name!r} (data set {where.get('path')!r}, revision "
        f"{where.get('revision')!r}) cannot be had: {reason}. {advice}"
    )


def _told(error: BaseException) -> tuple[str, str]:
    """The reason and what to do about it."""
    causes = list(causes_of(error))
    status = status_of(error)
    if is_offline_mode():
        reason = "HF_HUB_OFFLINE is set, and they are not in the cache"
        advice = "Unset it, or load the task once on a machine with the same HF_HOME"
    elif "is a gated dataset" in str(error):
        reason = "access to the data set must be asked for"
        advice = "Ask for it on the data set's page of the hub, and set HF_TOKEN"
    elif status == _TOO_MANY:
        reason = "the hub is asked too often (429)"
        advice = (
            "Run again later, what is loaded is kept; with HF_TOKEN set the limits are higher, and "
            "HF_ENDPOINT names a mirror"
        )
    elif passes(status):
        reason = f"the hub has an error of its own ({status})"
        advice = "Run again later; HF_ENDPOINT names a mirror"
    elif any(isinstance(cause, httpx.TransportError | ConnectionError) for cause in causes):
        reason = "the hub cannot be reached"
        advice = "Check the network and HF_ENDPOINT, which names a mirror"
    elif any(isinstance(cause, datasets.exceptions.DatasetNotFoundError) for cause in causes):
        reason = " ".join(str(error).split())
        advice = "If it is private, set HF_TOKEN; a mirror (HF_ENDPOINT) may lack it"
    else:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        advice = "Clear this data set from HF_HOME and run again; see whether mteb has a fix"
    return reason, advice
