"""Move MLflow's aliases `champion` and `previous` together, one process at a time over all
machines.

MLflow writes one alias at a time, has no transaction over two and no write that asks for the value
before it. What it does have is a name that only one process can create. What is made of that:

- Who asks for `champion` gets the old or the new version, never none and never a third: it moves by
  one write, and `previous` is written before it. In between both name the old champion.
- One move at a time, whichever machines want one: who moves holds a registered model of a set name
  (`lock_name`), which the store creates for one of them and refuses to the others.
- What a move is going to do stands in that lock before an alias is touched. A process that dies
  leaves the lock; one that finds it unchanged for `LEASE_SECONDS` finishes the move and removes it.
  Of several that find it so, one may: who does holds a second name, made of the dead holder's id,
  which no lock has twice. Waiting is timed by the waiter's clock alone.

Not guaranteed: tools that set aliases without asking for the lock, and a process that stops for
longer than the lease between asking for the time and its next write.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rayembed.errors import TrackingError

CANDIDATE = "candidate"
"""Alias of the latest version that was registered with scores, which gates may judge."""
CHAMPION = "champion"
PREVIOUS = "previous"

ROLLED_BACK_TAG = "rayembed.rolled_back"
"""Tag of a version that was champion and was rolled back, with the time."""

LEASE_SECONDS = 60.0
"""Seconds after which an unchanged lock counts as abandoned by a dead process."""

WAIT_SECONDS = 300.0
"""Maximum seconds to wait for concurrent moves."""

POLL_SECONDS = 0.5

_HOLDER_TAG = "rayembed.holder"
_MOVE_TAG = "rayembed.move"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Move:
    """Versions that both aliases point to after a move."""

    champion: int
    previous: int | None
    former: int | None
    """Champion before the move."""
    rolled_back: bool = False
    """Whether the former champion was rolled back."""


def lock_name(name: str) -> str:
    """Name of the registered model that serves as a lock while the aliases of `name` are moved."""
    return f"{name}-aliases-being-moved"


@contextmanager
def version_turn(client: Any, name: str) -> Iterator[None]:
    """Context manager that holds a lock, so that only one process at a time creates versions of a
    model.

    Raises:
        TrackingError: others have not come to an end within `WAIT_SECONDS`.
    """
    lock, holder = f"{name}-version-being-made", uuid.uuid4().hex
    _take(client, name, lock, holder)
    try:
        yield
    finally:
        _release(client, lock, holder)


def alias_version(client: Any, name: str, alias: str) -> int | None:
    """Number of the version that an alias points to; None if the alias does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        return int(client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


@contextmanager
def turn(client: Any, name: str) -> Iterator[Callable[[Move], None]]:
    """Context manager that holds the lock on a model's aliases, and yields the function that moves
    the aliases.

    What a process that died left undone is finished before. Aliases that are read within the turn
    are those that the move starts from.

    Raises:
        TrackingError: others have not come to an end within `WAIT_SECONDS`, or this process took
            longer than its lease allows.
    """
    lock, holder = lock_name(name), uuid.uuid4().hex
    _take(client, name, lock, holder)
    end = time.monotonic() + LEASE_SECONDS / 2
    unfinished = False

    def move(wanted: Move) -> None:
        nonlocal unfinished
        if time.monotonic() > end or _holder(client, lock) != holder:
            raise TrackingError(
                f"MLflow answers too slowly to move the aliases of {name!r} safely; nothing "
                "was changed: run the command again"
            )
        # From here on the move is finished, by this process or the next one.
        unfinished = True
        client.set_registered_model_tag(lock, _MOVE_TAG, json.dumps(asdict(wanted)))
        _apply(client, name, wanted, end=end)
        unfinished = False

    try:
        yield move
    finally:
        if not unfinished:
            _release(client, lock, holder)


def _create(client: Any, lock: str, holder: str) -> bool:
    """Try to create the lock for `holder`; return whether that succeeded."""
    from mlflow.exceptions import MlflowException

    told = "Exists while a model of the registry is changed; removed by itself."
    try:
        client.create_registered_model(lock, tags={_HOLDER_TAG: holder}, description=told)
    except MlflowException as error:
        # The store reads the one that it found, which may be gone by then.
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"):
            raise
        return False
    return True


def _release(client: Any, lock: str, holder: str) -> None:
    """Remove the lock, unless another process holds it."""
    from mlflow.exceptions import MlflowException

    try:
        if _holder(client, lock) == holder:
            client.delete_registered_model(lock)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def _take(client: Any, name: str, lock: str, holder: str) -> None:
    """Acquire the lock, waiting for other processes; take over a lock whose holder died.

    Raises:
        TrackingError: others have it for `WAIT_SECONDS`.
    """
    began = time.monotonic()
    watched, seen, since = lock, None, began
    while not _create(client, lock, holder):
        other, now = _holder(client, watched), time.monotonic()
        if other != seen:
            seen, since = other, now
        elif other is not None and now - since > LEASE_SECONDS:
            # Another process may be at it, and may die of it: then its lock is the one to watch.
            done = _take_over(client, name, lock, watched, other)
            watched, seen = (lock if done else _successor(lock, other)), None
            continue
        if other is None:
            watched = lock
        if now - began > WAIT_SECONDS:
            raise TrackingError(
                f"the registered model {name!r} is being changed by others: another process "
                f"has held the lock {lock} for {WAIT_SECONDS:.0f} s. Nothing was changed; "
                "run the command again later"
            )
        time.sleep(POLL_SECONDS)


def _successor(lock: str, holder: str) -> str:
    """Name of the second lock that a process must hold to remove the lock of a dead holder."""
    return f"{lock}-after-{holder}"


def _take_over(client: Any, name: str, lock: str, watched: str, dead: str) -> bool:
    """Try to remove the lock of a dead process and to complete its move; return whether this
    process did so.

    Args:
        watched: the lock itself, or the name of a successor that died.
        dead: its holder.
    """
    mine, successor = uuid.uuid4().hex, _successor(lock, dead)
    if not _create(client, successor, mine):
        return False
    try:
        # Nobody else removes it from here on: another may have done so before.
        if _holder(client, watched) == dead:
            if watched == lock_name(name):
                _finish(client, name)
            _release(client, watched, dead)
    finally:
        _release(client, successor, mine)
    return True


def _finish(client: Any, name: str) -> None:
    """Complete the alias move that a dead process left unfinished."""
    tags = client.get_registered_model(lock_name(name)).tags
    if _MOVE_TAG not in tags:
        return
    move = Move(**json.loads(tags[_MOVE_TAG]))
    if alias_version(client, name, CHAMPION) in (move.former, move.champion):
        _logger.warning(
            "completing an alias move that a stopped process left unfinished: the champion "
            "of %s becomes version %d",
            name,
            move.champion,
        )
        _apply(client, name, move, end=time.monotonic() + LEASE_SECONDS / 2)


def _apply(client: Any, name: str, move: Move, *, end: float) -> None:
    """Set both aliases to their targets; repeating it changes nothing."""

    def write(call: Callable[..., Any], *arguments: str) -> None:
        if time.monotonic() > end:
            raise TrackingError(
                f"MLflow answers too slowly to move the aliases of {name!r} safely, and the "
                "move may be incomplete; run the command again, which completes it first"
            )
        call(*arguments)

    if move.previous is None:
        if alias_version(client, name, PREVIOUS) is not None:
            write(client.delete_registered_model_alias, name, PREVIOUS)
    else:
        write(client.set_registered_model_alias, name, PREVIOUS, str(move.previous))
    write(client.set_registered_model_alias, name, CHAMPION, str(move.champion))
    if move.rolled_back:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        client.set_model_version_tag(name, str(move.former), ROLLED_BACK_TAG, now)
    if ROLLED_BACK_TAG in client.get_model_version(name, str(move.champion)).tags:
        client.delete_model_version_tag(name, str(move.champion), ROLLED_BACK_TAG)


def _holder(client: Any, lock: str) -> str | None:
    """Holder of the lock; None if it is free."""
    from mlflow.exceptions import MlflowException

    try:
        tags = client.get_registered_model(lock).tags
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return str(tags.get(_HOLDER_TAG))
