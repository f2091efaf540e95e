"""NumPy's files are read by many threads at a time, their headers by one."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from rayembed.assets import array_files
from rayembed.assets.array_files import load_array, load_arrays, map_array, save_array, save_arrays


@pytest.fixture
def most_at_once(monkeypatch):
    """Most threads that were within NumPy's reader at a time."""
    load, inside, seen = np.load, [], []

    def watched(*arguments, **options):
        inside.append(1)
        seen.append(len(inside))
        time.sleep(0.005)
        try:
            return load(*arguments, **options)
        finally:
            inside.pop()

    monkeypatch.setattr(array_files.np, "load", watched)
    return lambda: max(seen)


@pytest.mark.parametrize("guarded", [True, False])
def test_headers_are_read_by_one_thread_at_a_time(guarded, most_at_once, tmp_path, monkeypatch):
    """CPython 3.11 parses Python, which headers are, in one thread at a time without an error."""
    rows = np.arange(5)
    save_arrays(str(tmp_path / "some.npz"), rows=rows)
    save_array(str(tmp_path / "one.npy"), rows)
    if not guarded:
        monkeypatch.setattr(array_files, "_ONE_AT_A_TIME", nullcontext())
    reads = [
        lambda: load_arrays(str(tmp_path / "some.npz"))["rows"],
        partial(load_array, str(tmp_path / "one.npy")),
        partial(map_array, tmp_path / "one.npy"),
    ]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda read: read(), reads * 8):
            np.testing.assert_array_equal(found, rows)
    assert (most_at_once() == 1) == guarded
