"""`rayembed index` whose tasks note which texts they embed, for `index_kills`.

`INDEX_TASK` chooses the task: `counted`; `slow`, whose store takes a while for each part; `marks-
first`, the same with a fault: ledger and done-marks are written before the store has the rows.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rayembed.assets.arrow_files import read_sealed
from rayembed.data.engine.parts import remedy
from rayembed_extras.indexing import parts
from rayembed_extras.indexing.parts import EmbedIndexPart, settle, write_part
from rayembed_extras.indexing.places import opened

EVENTS = "embedded.jsonl"
"""File of the storage: a line at the begin and the end of each part."""

_STORE_SECONDS = 0.3


@dataclass(frozen=True)
class CountedPart(EmbedIndexPart):
    """Task of the job that notes begin and end of each part, with the texts."""

    def _embed(self, number, rows, found, device):
        self._note("begin", number, len(found.embed))
        result = super()._embed(number, rows, found, device)
        self._note("end", number, result["embedded"])
        return result

    def _note(self, event, number, texts):
        line = {"event": event, "part": number, "texts": texts, "process": os.getpid()}
        path = Path(self.files.ledger).parents[3] / EVENTS
        with path.open("a") as file:  # of one write each, which several processes may do
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class SlowPart(CountedPart):
    """The same with a store that takes a while before it has the rows of a part."""

    def __call__(self, item, device="cpu"):
        if not hasattr(item, "number"):
            return super().__call__(item, device)
        rows, found = self.files.difference(item.number)
        result = self._embed(item.number, rows, found, device)
        self._settle(item.number, rows, found, result)
        return result

    def _settle(self, number, rows, found, result):
        store = _Slow(opened(self.store))
        settle(self.files, store, self.table, number, rows, found, result, self.layout)


@dataclass(frozen=True)
class MarksFirstPart(SlowPart):
    """A fault: ledger and done-mark are written before the store has the rows."""

    def _settle(self, number, rows, found, result):
        path = self.files.vectors_path(number)
        made = read_sealed(path, remedy=remedy(path)).drop_columns(["text_hash"])
        settle(self.files, _Nothing(), self.table, number, rows, found, result, self.layout)
        _Slow(opened(self.store)).write_part(self.table, number, made, found.delete)


class _Slow:
    def __init__(self, store):
        self._store = store

    def write_part(self, *given):
        time.sleep(_STORE_SECONDS)
        write_part(self._store, *given)


class _Nothing:
    def write_part(self, *_):
        pass


TASKS = {"counted": CountedPart, "slow": SlowPart, "marks-first": MarksFirstPart}


def main():
    """Run the job with its arguments."""
    import index_counted  # the workers' name of this module
    from rayembed.jobs.table import JOBS
    from rayembed_extras.indexing import build

    assert build.EmbedIndexPart is parts.EmbedIndexPart
    build.EmbedIndexPart = index_counted.TASKS[os.environ["INDEX_TASK"]]
    return JOBS.get("index")(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
