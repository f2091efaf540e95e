"""How far a unit of work is, as its loops tell it."""

import threading

import numpy as np
import pytest

from rayembed.display.progress import hearing, piece, pieces, present_listener, tell
from rayembed.search.exact import top_k_of_blocks


def test_pieces_within_pieces_share_what_is_done():
    heard = []
    with hearing(heard.append):
        with piece(0.0, 0.5):
            for _ in pieces("ab"):
                tell(0.5)
                tell(1.0)
        with piece(0.5, 1.0):
            tell(1.0)
    assert heard == [0, 0, 0.125, 0.25, 0.25, 0.375, 0.5, 0.5, 1.0]


def test_an_error_ends_the_pieces_that_it_leaves():
    heard = []
    with hearing(heard.append):
        with pytest.raises(ZeroDivisionError), piece(0.5, 1.0):
            raise ZeroDivisionError
        tell(0.25)
    assert heard[-1] == 0.25


def test_a_unit_within_a_unit_is_heard_by_its_own_listener_alone():
    outer, inner = [], []
    with hearing(outer.append), piece(0.5, 1.0):
        with hearing(inner.append):
            tell(0.5)
        tell(0.5)
    assert (outer, inner) == ([0.5, 0.75], [0.5])
    assert present_listener() is None


def test_a_loop_that_is_left_in_the_middle_brings_no_listener_back():
    heard = []
    with hearing(heard.append):
        left = pieces([1, 2])
        next(left)
    left.close()
    assert present_listener() is None


def test_another_thread_tells_nobody():
    heard = []
    with hearing(heard.append):
        thread = threading.Thread(target=tell, args=(0.5,))
        thread.start()
        thread.join()
    assert heard == []


def test_searches_tell_how_far_they_are():
    random = np.random.default_rng(0)
    queries, documents = random.normal(size=(6, 8)), random.normal(size=(10, 8))
    heard = []
    with hearing(heard.append):
        found = top_k_of_blocks([queries[:3], queries[3:]], [documents], 2, of=10)
    assert heard == [0, 0.5]
    silent = top_k_of_blocks([queries[:3], queries[3:]], [documents], 2)
    for (scores, ids), (expected, places) in zip(found, silent, strict=True):
        np.testing.assert_array_equal(scores, expected)
        np.testing.assert_array_equal(ids, places)
