"""A hub of made-up data sets on loopback, in a process of its own as a real one is.

Neither its CPU seconds nor its memory are those of the process that reads it.
"""

import multiprocessing
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

# datasets counts each load at an address of its own, which is not there.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
_SUPPORT = str(Path(__file__).resolve().parents[1] / "tests" / "support")
if _SUPPORT not in sys.path:
    sys.path.append(_SUPPORT)


@contextmanager
def hub_beside(make, cache):
    """The id of the hub's process. Inside it `datasets` reads the hub, here and in processes that
    are started.

    Args:
        make: gives the repositories (name → path → content) and their revisions (empty for those
            that `dataset_hub` has by default); called in the hub's process.
        cache: folder for what is downloaded.
    """
    import pytest
    from dataset_hub import DatasetHub
    from mteb_hub import read_from

    context = multiprocessing.get_context("fork")
    told, telling = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(make, telling), daemon=True)
    process.start()
    telling.close()  # so that a hub that ends is not waited for
    try:
        hub = DatasetHub({}, address=told.recv())
        with pytest.MonkeyPatch.context() as patch:
            read_from(patch, hub, Path(cache))
            yield process.pid
    finally:
        process.terminate()
        process.join()


def _serve(make, telling):
    from dataset_hub import dataset_hub

    files, revisions = make()
    with dataset_hub(files, revisions=revisions) as hub:
        telling.send(hub.address)
        threading.Event().wait()
