"""Units that run: their age and process, how often they were late, how many a task takes."""

from types import SimpleNamespace

import pytest

from rayembed.data.watched import Running, Watch, name_of, next_units

HERE, THERE = ("node", 1), ("node", 2)


class Clock:
    """Time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_units_grow_old_until_their_process_begins_another() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.begin("a", 0, "zero", HERE)
    clock.now = 10
    watch.begin("a", 1, "one", THERE)
    watch.begin("b", 0, "of another", HERE)
    clock.now = 15
    assert watch.running("a") == [Running(0, "zero", HERE, 15), Running(1, "one", THERE, 5)]
    watch.begin("a", 2, "two", HERE)
    watch.end("a", THERE)
    assert watch.running("a") == [Running(2, "two", HERE, 0)]
    watch.forget("a")
    assert watch.running("a") == []
    assert len(watch.running("b")) == 1


def test_a_unit_whose_process_died_is_as_old_as_its_next_process_has_it() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.begin("a", 7, "seven", HERE)
    clock.now = 100
    watch.begin("a", 7, "seven", THERE)
    assert watch.running("a") == [Running(7, "seven", THERE, 0)]


def test_only_units_whose_process_was_ended_count_as_late() -> None:
    watch = Watch(Clock())
    for ended in (True, False, True):
        watch.begin("a", 7, "seven", HERE)
        (unit,) = watch.running("a")
        watch.count_late("a", unit, ended=ended)
        assert watch.running("a") == []
    assert watch.take("a", [6, 7], "six", HERE) == [0, 2]
    assert [unit.number for unit in watch.running("a")] == [6]
    assert watch.take("b", [7], "seven", HERE) == [0]
    watch.forget("a")
    assert watch.take("a", [7], "seven", HERE) == [0]


def test_a_unit_is_named_by_its_key_and_its_file() -> None:
    part = SimpleNamespace(path="s3://b/part")
    assert name_of(SimpleNamespace(key="k", part=part)) == "k of s3://b/part"
    assert name_of(SimpleNamespace(key="k", path="p")) == "k of p"
    assert name_of(SimpleNamespace(key="k")) == "k"


@pytest.mark.parametrize(
    ("left", "cpus", "seconds", "wanted"),
    [
        (100, 2, None, (100, 1)),  # few: all at once
        (100_000, 2, None, (16, 1)),  # many: some are tried
        (99_984, 2, 0.001, (99_984, 2000)),  # tiny ones share tasks of two seconds
        (99_984, 2, 0.1, (2048 * 20, 20)),
        (99_984, 2, 60.0, (2048, 1)),
        (10_000_000, 1000, 0.1, (10_000_000, 200)),  # more processes need longer tasks
        (50, 2, 0.001, (50, 7)),  # at least four tasks a CPU, for balance
    ],
)
def test_tasks_take_seconds_and_executions_are_bounded(left, cpus, seconds, wanted) -> None:
    assert next_units(left, cpus, seconds) == wanted
