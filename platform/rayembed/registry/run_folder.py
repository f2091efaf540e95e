"""Bind a run's folder to its settings: the same run resumes there, a different run of the same name
is refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.config.document import NamedRun
from rayembed.errors import ArtifactError, ConfigError, StorageError

RUN_FILE = "run.yaml"
"""File of the resolved run in its folder."""

_SHOWN = 3
"""Settings that a message names."""


def refuse_other_run(
    name: str, fingerprint: str, found: str | None, where: str, differing: Sequence[str] = ()
) -> None:
    """Raise if the fingerprint recorded in a folder differs from the run's.

    Args:
        found: the fingerprint of what stands there under that name; None: it has none.
        where: the place, for the message.
        differing: settings that differ, with both values.

    Raises:
        ArtifactError: it is another run's; the message tells both fingerprints and what to do.
    """
    if found == fingerprint:
        return
    other = f"with fingerprint {found}" if found else "that rayembed did not make"
    raise ArtifactError(
        f"the run {name!r} (fingerprint {fingerprint}) cannot go on in {where}: there is "
        f"another run of that name {other}. {_told(differing)}. Give the new run another "
        "name (--set name=…), restore the settings, or remove the existing run."
    )


def _told(differing: Sequence[str]) -> str:
    if not differing:
        return "Model, data, stages or seed differ; `--dry-run` prints this run"
    shown = "; ".join(differing[:_SHOWN])
    more = len(differing) - _SHOWN
    return f"There {shown}" + (f"; and {more} more settings differ" if more > 0 else "")


def differing_settings(run: NamedRun, former: NamedRun) -> list[str]:
    """List the identity settings that differ, in the form `path is old value, here new value`."""
    new, old = (flatten(one.identity(), by_name=True) for one in (run, former))
    paths = sorted(path for path in new.keys() | old.keys() if new.get(path) != old.get(path))
    return [f"{path} is {old.get(path)!r}, here {new.get(path)!r}" for path in paths]


def flatten(values: Any, prefix: str = "", *, by_name: bool = False) -> dict[str, Any]:
    """Flatten nested settings to paths such as `stages.0.batch.global_pairs`; None and empty groups
    are kept.

    Args:
        by_name: whether members of a list go by their `name`, as `--set` has them.
    """
    if isinstance(values, Mapping) and values:
        items: Any = values.items()
    elif isinstance(values, list | tuple) and any(isinstance(v, Mapping) for v in values):
        items = ((v.get("name", i) if by_name else i, v) for i, v in enumerate(values))
    else:
        return {prefix: values}
    flat: dict[str, Any] = {}
    for name, value in items:
        flat.update(flatten(value, f"{prefix}.{name}" if prefix else str(name), by_name=by_name))
    return flat


def check_run_folder(folder: str | Path, run: NamedRun, *, place: str | None = None) -> bool:
    """Return whether the run would resume in the folder (True) or start there (False), without
    writing.

    Args:
        place: where the folder's files come from, for messages; None: the folder itself.

    Raises:
        ArtifactError: the folder belongs to another run, or its `run.yaml` cannot be read.
    """
    path, where = Path(folder) / RUN_FILE, str(folder) if place is None else place
    if not path.exists():
        return False
    try:
        found = type(run).read(path)
    except ConfigError as error:
        raise ArtifactError(
            f"the folder {where!r} of the run {run.name!r} holds a {RUN_FILE} that "
            f"cannot be read: {error}\nGive this run another name (--set name=…) or move the "
            "folder away."
        ) from None
    told = differing_settings(run, found)
    refuse_other_run(run.name, run.fingerprint, found.fingerprint, repr(where), told)
    return True


def claim_run_folder(folder: str | Path, run: NamedRun) -> bool:
    """Write the run's settings into the folder; return whether the run resumes there (True) or
    starts (False).

    The resolved run is written as `run.yaml`; where the run goes on it takes the place of the
    former one, because its placement may have changed.

    Raises:
        ArtifactError: the folder belongs to another run, or its `run.yaml` cannot be read or
            written. Nothing was changed then.
    """
    resumed = check_run_folder(folder, run)
    try:
        write_atomic(Path(folder) / RUN_FILE, run.to_yaml().encode())
    except StorageError as error:
        raise ArtifactError(
            f"the folder {str(folder)!r} of the run {run.name!r} cannot be written: {error}; "
            "correct placement.storage_path or the folder's permissions"
        ) from error
    return resumed
