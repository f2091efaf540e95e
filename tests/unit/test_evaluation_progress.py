"""Which worker gets the next call, seen over all runners."""

from rayembed.evaluation.pooled.progress import Told


def test_the_next_call_goes_where_all_runners_together_gave_least():
    told = Told()
    assert told.least_busy("a", {}, [0, 1, 2], home=0) == 0
    assert told.least_busy("b", {}, [0, 1, 2], home=0) == 1, "the other task's call is counted"
    assert told.least_busy("a", {0: 1}, [0, 1, 2], home=0) == 2
    assert told.least_busy("b", {1: 1}, [1], home=0) == 1, "only where it may"


def test_of_equal_workers_the_units_own_is_taken():
    told = Told()
    assert [told.least_busy(str(home), {}, [0, 1, 2, 3], home) for home in (6, 3, 4)] == [2, 3, 0]


def test_what_is_done_no_longer_counts():
    told = Told()
    assert told.least_busy("a", {}, [0, 1], home=0) == 0
    assert told.least_busy("b", {}, [0, 1], home=0) == 1
    told.settle("a")
    assert told.least_busy("c", {}, [0, 1], home=1) == 0
    # A runner tells anew each time what it has.
    assert told.least_busy("b", {}, [0, 1], home=1) == 1
