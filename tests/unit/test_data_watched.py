"""Units that run: their age and process, how often they were late, how many a task takes."""

from types import SimpleNamespace

import pytest

from rayembed.data.engine import watch_on_ray as on_ray
from rayembed.data.engine.watch_on_ray import TRIES, Running, Watch, name_of, next_units
from rayembed.errors import WorkerError

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


def test_how_far_a_unit_is_belongs_to_its_process_and_ends_with_it() -> None:
    watch = Watch(Clock())
    watch.note("a", HERE, 0.5)
    watch.begin("a", 0, "zero", HERE)
    assert watch.running("a") == [Running(0, "zero", HERE, 0)]
    watch.note("a", HERE, 0.5)
    watch.begin("a", 1, "one", THERE)
    watch.note("a", THERE, 0.25)
    assert [unit.share for unit in watch.running("a")] == [0.5, 0.25]
    watch.begin("a", 0, "zero", THERE)
    assert watch.running("a") == [Running(0, "zero", THERE, 0)]
    watch.note("a", THERE, 0.75)
    watch.forget("a")
    watch.begin("a", 0, "zero", THERE)
    assert watch.running("a") == [Running(0, "zero", THERE, 0)]


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


class Remote:
    """An object's methods as those of an actor, whose answers are there at once."""

    def __init__(self, of: object) -> None:
        self._of = of

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._of, name))


def test_a_unit_that_was_late_too_often_is_an_error_that_names_it(monkeypatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "node")
    fake = SimpleNamespace(get=lambda answer: answer, get_runtime_context=lambda: context)
    monkeypatch.setattr(on_ray, "ray", fake)
    watch = Watch(Clock())
    guard = on_ray.Guard(Remote(watch), "a", 5.0)
    units = [(n, SimpleNamespace(key=f"k{n}", path=f"file{n}")) for n in range(3)]
    for _ in range(TRIES):
        given = guard.watched(units)
        assert [next(given).key, next(given).key] == ["k0", "k1"]
        (unit,) = watch.running("a")
        assert (unit.number, unit.name) == (1, "k1 of file1")
        watch.count_late("a", unit, ended=True)
        given.close()
    given = guard.watched(units)
    assert next(given).key == "k0", "units before it are done again"
    with pytest.raises(WorkerError, match=r"unit k1 of file1 took longer .*=5 in each of 3"):
        next(given)
    assert watch.running("a") == [], "the process has told that it ended"


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
        (10_000_000, 1000, 0.1, (10_000_000, 1000)),  # more processes need longer tasks
        (50, 2, 0.001, (50, 7)),  # at least four tasks a CPU, for balance
    ],
)
def test_tasks_take_seconds_and_executions_are_bounded(left, cpus, seconds, wanted) -> None:
    assert next_units(left, cpus, seconds) == wanted
