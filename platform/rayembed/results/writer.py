"""Write one model's mteb result files; only one process at a time may do so.

`<folder>/results/<org>__<model>/<revision>/` holds `<Task>.json`, `model_meta.json` and
`run_settings.jsonl` as mteb lays them out, so that they can go to its public collection.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mteb
from filelock import FileLock, Timeout
from mteb.models import ModelMeta

from rayembed.assets.storage import write_atomic
from rayembed.errors import ArtifactError

logger = logging.getLogger(__name__)

_LOCK = ".lock"


class ResultWriter:
    """Writer of the results of one model revision in a local folder. Made by `open_results`."""

    def __init__(self, folder: Path, meta: ModelMeta) -> None:
        self.meta = meta
        self._cache = mteb.ResultCache(folder)
        self.place: Path = self._cache.get_task_result_path("any", meta).parent
        """Folder of the model's result files."""

    def finished(self, task: Any) -> Any | None:
        """Read the stored result of the task if it covers all splits and subsets, else
        return None.

        What is half written, or was made of another revision of the data, counts as missing.
        """
        result = self._there(task.metadata.name)
        if result is None or result.dataset_revision != task.metadata.revision:
            return None
        return None if result.get_missing_evaluations(task) else result

    def save(self, result: Any) -> Any:
        """Save the task's result, merged with splits and subsets that are stored already.

        Splits and subsets that are there already, of the same revision of the data, stay.
        """
        self.place.mkdir(parents=True, exist_ok=True)
        there = self._there(result.task_name)
        if (
            there is not None
            and there.dataset_revision == result.dataset_revision
            and _parts(there) - _parts(result)
        ):
            result = there.merge(result)
            for scores in result.scores.values():  # not in the order in which they were done
                scores.sort(key=lambda score: str(score["hf_subset"]))
        self._cache.save_to_cache(result, self.meta)
        # As it is read next time: what is written down is rounded.
        return mteb.TaskResult.from_disk(self._path(result.task_name))

    def keep(self, name: str, content: str) -> Path:
        """Write an additional file next to mteb's result files."""
        path = self.place / name
        write_atomic(str(path), content.encode())
        return path

    def kept(self, name: str) -> str | None:
        """Content of an additional file; None if it does not exist."""
        path = self.place / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def keep_first(self, name: str, content: str) -> str:
        """Write an additional file unless it exists, and return the stored content."""
        if (first := self.kept(name)) is not None:
            return first
        self.keep(name, content)
        return content

    def _there(self, task: str) -> Any | None:
        """Read the result in the task's file; None if the file is missing or unreadable."""
        path = self._path(task)
        if not path.exists():
            return None
        try:
            return mteb.TaskResult.from_disk(path)
        except (ValueError, KeyError) as error:
            logger.warning(
                "the result file %s cannot be read and will be written again: %s", path, error
            )
            return None

    def _path(self, task: str) -> Path:
        return Path(self._cache.get_task_result_path(task, self.meta))


@contextmanager
def open_results(
    folder: str | Path, meta: ModelMeta, wait_seconds: float = 0
) -> Iterator[ResultWriter]:
    """Open a writer for a model's results; until the `with` block ends, other processes of this
    machine cannot write them.

    Args:
        wait_seconds: how long another process may still write them.

    Raises:
        ArtifactError: another process writes them.
    """
    writer = ResultWriter(Path(folder), meta)
    writer.place.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(writer.place / _LOCK).acquire(timeout=wait_seconds):
            yield writer
    except Timeout:
        raise ArtifactError(
            f"another evaluation writes the results of {meta.name!r} in "
            f"{str(writer.place)!r} at this moment; wait for it to end, or give this "
            "evaluation another placement.storage_path"
        ) from None


def _parts(result: Any) -> set[tuple[str, str]]:
    """The (split, subset) pairs that have scores."""
    return {
        (split, str(score["hf_subset"]))
        for split, scores in result.scores.items()
        for score in scores
    }
