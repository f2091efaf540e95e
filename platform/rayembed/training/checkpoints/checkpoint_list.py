"""Repair the list that Ray Train keeps of a stage's checkpoints, before Ray Train reads it.

Train trusts its list. It goes on from the newest listed checkpoint, damaged or not, and does not
start at all when a listed one is gone or the list itself was cut off, as a full disk leaves it.
Knows the list's file and no Ray.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from rayembed.assets.storage import (
    exists,
    file_sizes,
    join,
    list_files,
    read_bytes,
    remove_file,
    remove_folder,
    write_atomic,
)
from rayembed.config.document import NamedRun
from rayembed.errors import StorageError
from rayembed.training.checkpoints.checkpoint import find_damage

logger = logging.getLogger(__name__)

CHECKPOINTS = "train"
"""Folder of a stage's checkpoints and of Train's list of them, within the stage's folder."""

LIST_FILE = "checkpoint_manager_snapshot.json"
"""File name of Train's checkpoint list."""

_PREFIX = "step-"


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after a number of steps; names sort in the order of
    steps.
    """
    return f"{_PREFIX}{step:07d}"


def repair_checkpoint_list(folder: str) -> bool:
    """Rewrite Ray Train's list so that it has exactly the complete checkpoints, and delete the
    incomplete ones; return whether a listed one was incomplete.

    Afterwards the folder holds whole checkpoints alone, and the list names all of them: also those
    that were whole when Train was killed, before it could list them. What else a killed worker left
    is removed without a word.

    Args:
        folder: in storage, of a stage's checkpoints and the list of them.

    Raises:
        StorageError: the storage cannot be read, or refuses what must be changed; nothing that
            could be whole is removed.
    """
    there = _checkpoints(folder)
    listed = _read(folder)
    damages = {name: find_damage(join(folder, name)) for name in {*there, *(listed or ())}}
    whole = sorted(name for name, damage in damages.items() if damage is None)
    damaged = {name: damages[name] or "" for name in listed or () if name not in whole}
    if listed is None and exists(join(folder, LIST_FILE)):
        logger.warning(
            "Ray Train's list of checkpoints %s is cut off or of another version of Ray: "
            "it is rebuilt from the complete checkpoints next to it (%s)",
            *(join(folder, LIST_FILE), ", ".join(whole) or "none"),
        )
    _warn_of(damaged, whole)
    # The list first: killed in between, one that names what is gone would stop Train.
    if listed is None or sorted(listed) != whole:
        _write(folder, whole)
    for name in there:
        if name not in whole:
            remove_folder(join(folder, name))
    return bool(damaged)


def list_newest(folder: str, keep: int) -> None:
    """Write the newest `keep` complete checkpoints to Ray Train's list, and remove all
    others.

    Args:
        folder: as in `repair_checkpoint_list`.
        keep: how many stay.
    """
    there = _checkpoints(folder)
    whole = [name for name in there if find_damage(join(folder, name)) is None]
    _write(folder, whole[-keep:])
    for name in there:
        if name not in whole[-keep:]:
            remove_folder(join(folder, name))


def remove_states(run: NamedRun, run_folder: str) -> None:
    """Remove the checkpoints of a finished run, unless `placement.keep_states` is true.

    Nothing reads them any more: the weights of each stage in storage say that it is done. A storage
    that refuses is only warned of.
    """
    if run.placement.keep_states:
        return
    num_bytes = 0
    try:
        for stage in run.stage_names:
            folder = join(run_folder, stage, CHECKPOINTS)
            if sizes := file_sizes(folder, recursive=True):
                remove_folder(folder)
                num_bytes += sum(sizes.values())
    except StorageError as error:
        logger.warning(
            "some checkpoints of the finished run could not be removed: %s. Run the same "
            "command again to retry",
            error,
        )
    if num_bytes:
        logger.info(
            "run %s is done: removed %.1f MB of checkpoints (placement.keep_states=true keeps "
            "them)",
            *(run.name, num_bytes / 1e6),
        )


def listed_checkpoints(folder: str) -> list[str]:
    """Return the sorted names of the listed checkpoints; empty if the list is missing or
    unreadable.
    """
    return sorted(_read(folder, any_version=True) or ())


def newest_step(stage_folder: str) -> int:
    """Return the step of a stage's newest checkpoint; 0 if it has no checkpoint."""
    names = listed_checkpoints(join(stage_folder, CHECKPOINTS))
    return int(names[-1].removeprefix(_PREFIX)) if names else 0


def _warn_of(damages: Mapping[str, str], whole: Sequence[str]) -> None:
    for name, damage in damages.items():
        logger.warning("the checkpoint %s is incomplete and is removed: %s", name, damage)
    if damages and (not whole or max(damages) > whole[-1]):
        before = whole[-1] if whole else "its beginning"
        logger.warning("the stage resumes from %s", before)


def _checkpoints(folder: str) -> list[str]:
    """Return the names of all checkpoint folders, complete or not, in the order of steps."""
    tops = {path.partition("/")[0] for path in list_files(folder, recursive=True)}
    return sorted(top for top in tops if re.fullmatch(rf"{_PREFIX}\d+", top))


def _read(folder: str, *, any_version: bool = False) -> list[str] | None:
    """Return the names in Ray Train's list; None if it is unreadable or was written by another
    version of Ray.
    """
    path = join(folder, LIST_FILE)
    if not exists(path):
        return None
    try:
        listed = json.loads(read_bytes(path))
        names = [str(result["checkpoint_dir_name"]) for result in listed["checkpoint_results"]]
        if not all(re.fullmatch(rf"{_PREFIX}\d+", name) for name in names):
            return None
        right = any_version or listed["ray_version"] == version("ray")
    except (ValueError, KeyError, TypeError):
        return None
    return names if right else None


def _write(folder: str, names: Sequence[str]) -> None:
    path = join(folder, LIST_FILE)
    if not names:
        if exists(path):
            remove_file(path)
        return
    write_atomic(path, json.dumps(_new_list(names)).encode())


def _new_list(names: Sequence[str]) -> dict[str, Any]:
    """Make the content of a checkpoint list in the format of Ray 2.60, newest checkpoint last."""
    results = [
        {
            "version": 0,
            "checkpoint_dir_name": name,
            "metrics": {"step": int(name.removeprefix(_PREFIX))},
        }
        for name in names
    ]
    return {
        "ray_version": version("ray"),
        "checkpoint_results": results,
        "checkpoint_report_indices": list(range(len(results))),
        "latest_checkpoint_result": results[-1],
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": len(results),
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
