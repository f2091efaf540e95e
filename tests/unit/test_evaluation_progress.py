"""Which worker gets the next call, seen over all runners."""

from rayembed.evaluation.pooled.progress import PoolProgress


def test_the_next_call_goes_where_all_runners_together_gave_least():
    progress = PoolProgress()
    assert progress.least_busy("a", {}, [0, 1, 2], home=0) == 0
    assert progress.least_busy("b", {}, [0, 1, 2], home=0) == 1, "the other task's call is counted"
    assert progress.least_busy("a", {0: 1}, [0, 1, 2], home=0) == 2
    assert progress.least_busy("b", {1: 1}, [1], home=0) == 1, "only where it may"


def test_of_equal_workers_the_units_own_is_taken():
    progress = PoolProgress()
    taken = [progress.least_busy(str(home), {}, [0, 1, 2, 3], home) for home in (6, 3, 4)]
    assert taken == [2, 3, 0]


def test_what_is_done_no_longer_counts():
    progress = PoolProgress()
    assert progress.least_busy("a", {}, [0, 1], home=0) == 0
    assert progress.least_busy("b", {}, [0, 1], home=0) == 1
    progress.settle("a")
    assert progress.least_busy("c", {}, [0, 1], home=1) == 0
    # A runner tells anew each time what it has.
    assert progress.least_busy("b", {}, [0, 1], home=1) == 1
