"""Write to a vector store from a process of its own, as a worker does that may be killed.

    python index_store_writer.py TASK.json

The task has `settings` of the store, `table`, `number_type`, `calls`: pairs of a seed and ids to
upsert, `limit`: largest size of a file in bytes, and `finish`. Each finished call prints a line.
"""

import json
import resource
import signal
import sys
from pathlib import Path

import numpy as np
from index_engines import drawn_rows, layout_of

from rayembed.config.settings import parse
from rayembed.errors import StorageError
from rayembed_extras.indexing.settings import STORES


def main(task: dict) -> None:
    """Carry out a task."""
    settings = parse(STORES.classes()[task["settings"]["kind"]], task["settings"])
    layout = layout_of(task["number_type"])
    store = settings.open()
    if task.get("limit"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (task["limit"], task["limit"]))
    print("ready", flush=True)  # noqa: T201
    try:
        for seed, ids in task["calls"]:
            store.upsert(task["table"], drawn_rows(np.random.default_rng(seed), ids, layout))
            print("written", seed, flush=True)  # noqa: T201
        if task.get("finish"):
            store.finish(task["table"], layout)
            print("finished", flush=True)  # noqa: T201
    except StorageError as error:
        print("refused", error, flush=True)  # noqa: T201
    store.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
