"""The user's own queries, documents and judgements as a retrieval task of mteb.

The data are read and checked once (`own_data`), kept in the cache of assets, and mapped from there:
a corpus never stands in memory whole. The revision of the data set is a fingerprint of its content
and of the instruction, so that results of other data or another instruction never pass for these.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.get_tasks import TASK_LIST
from mteb.languages import check_language_code

from rayembed.assets.arrow_files import read_stream
from rayembed.assets.cache import cache_folder, filled
from rayembed.config.document import fingerprint
from rayembed.errors import ConfigError
from rayembed.evaluation.own_data import (
    CORPUS,
    JUDGEMENTS,
    QUERIES,
    About,
    find_files,
    read_about,
    write_set,
)
from rayembed.evaluation.wikipedia_tasks import CROSS_LINGUAL, TASK_NAMES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LAYOUT = "1"
"""Of what is kept in the cache; another one is made anew."""


@dataclass(frozen=True)
class OwnSet:
    """A factory of a retrieval task over the user's own data, used as `MtebTask` is."""

    name: str
    """The task's, in tables and result files; none of mteb's."""
    path: str
    """Folder with `corpus`, `queries` and `qrels`, local or in object storage."""
    split: str = "test"
    """Which judgements of `qrels/` count."""
    instruction: str = ""
    """Goes before the queries of models that take instructions."""
    language: str = "eng-Latn"
    """Code and script, as mteb writes them."""

    def load(self) -> Any:
        """A fresh task; the data are read the first time on this machine.

        Raises:
            ConfigError: a name that cannot be one or is a task of mteb's, or an unknown language.
            DataError: no such set, or rows that cannot be scored; all are counted.
        """
        self._check()
        folder = _written(self.path, self.split)
        return _OwnRetrieval(self, folder, read_about(folder))

    @property
    def num_texts(self) -> int:
        """Documents and queries; reads the data the first time, as `load` does."""
        about = self.about
        return about.documents + about.queries

    @property
    def about(self) -> About:
        """What the set holds and what was left out of it."""
        return read_about(_written(self.path, self.split))

    def _check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"the own set's name {self.name!r} names a file; use letters, digits, '.', '_' "
                "and '-', beginning with a letter or digit"
            )
        known = {task.metadata.name for task in TASK_LIST} | {*TASK_NAMES, CROSS_LINGUAL}
        if self.name in known:
            raise ConfigError(
                f"the own set's name {self.name!r} is that of another task; choose another one"
            )
        try:
            check_language_code(self.language)
        except ValueError:
            raise ConfigError(
                f"the own set {self.name!r} has the language {self.language!r}; wanted are a code "
                "of ISO 639-3 and a script of ISO 15924, such as eng-Latn"
            ) from None


@lru_cache(maxsize=64)
def _written(path: str, split: str) -> Path:
    """The folder on this machine with what was read of a set."""
    files = find_files(path, split)
    entry = cache_folder() / "own-sets" / f"{files.key}-{_LAYOUT}"

    def fill(folder: Path) -> None:
        write_set(files, folder)

    return filled(entry, fill)


class _OwnRetrieval(AbsTaskRetrieval):  # type: ignore[misc] # untyped
    """The queries of a set find its documents."""

    def __init__(self, own: OwnSet, folder: Path, about: About) -> None:
        self.metadata = _metadata(own, about)
        self._folder = folder
        super().__init__()

    def load_data(self, num_proc: int | None = None, *, timer: Any = None, **_options: Any) -> None:
        """Map documents and queries, and read the judgements, to where mteb looks for them."""
        del num_proc, timer
        with pa.memory_map(str(self._folder / JUDGEMENTS)) as file:
            columns = read_stream(file).to_pydict()
        relevant: dict[str, dict[str, int]] = {}
        for query, document, grade in zip(*columns.values(), strict=True):
            relevant.setdefault(query, {})[document] = grade
        (split,) = self.metadata.eval_splits
        data = {
            "corpus": Dataset.from_file(str(self._folder / CORPUS)),
            "queries": Dataset.from_file(str(self._folder / QUERIES)),
            "relevant_docs": relevant,
            "top_ranked": None,
        }
        self.dataset = {"default": {split: data}}
        self.data_loaded = True

    def unload_data(self) -> None:
        """Free the loaded data; mteb's own would also forget which data this task holds."""
        self.dataset = {}
        self.data_loaded = False


def _metadata(own: OwnSet, about: About) -> TaskMetadata:
    content = {"content": about.fingerprint, "instruction": own.instruction}
    return TaskMetadata(
        name=own.name,
        description=f"Own queries, documents and judgements, split {own.split}.",
        type="Retrieval",
        category="t2t",
        main_score="ndcg_at_10",
        dataset={"path": f"own/{own.name}", "revision": fingerprint(content)},
        prompt={"query": own.instruction} if own.instruction else None,
        eval_splits=[own.split],
        eval_langs=[own.language],
    )
