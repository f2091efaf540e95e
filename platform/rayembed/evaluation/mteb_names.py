"""Index of mteb's task and benchmark names, because importing mteb takes seconds and misspelt names
should fail earlier. `tests/support/mteb_index.py` writes the index.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from rayembed.config.own_sets import Scores
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError

FILE = "mteb_names.json"


@dataclass(frozen=True)
class MtebNames:
    """All task and benchmark names of one version of mteb."""

    mteb: str
    """The version."""
    tasks: tuple[str, ...]
    """Tasks over texts, sorted."""
    other_tasks: dict[str, str]
    """Task over other inputs → these inputs."""
    benchmarks: tuple[str, ...]
    """Benchmarks over texts, also those that `evaluation.benchmarks` makes, sorted."""
    other_benchmarks: dict[str, str]
    """Benchmark over other inputs → these inputs."""
    aliases: tuple[str, ...]
    """Further benchmark names that mteb accepts; error messages never propose them."""


@lru_cache(maxsize=1)
def mteb_names() -> MtebNames | None:
    """Return the index of names; None if the installed mteb is another version, whose names may
    differ.
    """
    values = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    lists = ("tasks", "benchmarks", "aliases")
    found = MtebNames(**{**values, **{name: tuple(values[name]) for name in lists}})
    try:
        installed = version("mteb")
    except PackageNotFoundError:
        return None
    return found if installed == found.mteb else None


def check_names(setting: str, scores: Scores, also: Iterable[str] = ()) -> None:
    """Check, by the index of names, that mteb has the benchmarks and tasks that the
    settings name.

    Args:
        setting: of the scores, for messages; empty for those of an evaluation.
        also: further names of benchmarks.

    Raises:
        ConfigError: it has not, or they are over images, sound or video.
    """
    before = f"{setting}." if setting else ""
    further = tuple(also)
    for name in scores.benchmarks:
        if name not in further:
            check_benchmark(f"{before}benchmarks", name, further)
    for name in scores.tasks:
        check_task(f"{before}tasks", name)


def check_benchmark(setting: str, name: str, also: Iterable[str] = ()) -> None:
    """Check that mteb has the benchmark; raises the errors of `check_names`."""
    known = mteb_names()
    if known is None or name in {*known.benchmarks, *known.aliases}:
        return
    if (inputs := known.other_benchmarks.get(name)) is not None:
        raise ConfigError(
            f"{setting}: the benchmark {name!r} has tasks with inputs of type {inputs}, but only "
            "benchmarks over texts are evaluated"
        )
    raise ConfigError(f"{setting}: {no_benchmark(name, (*known.benchmarks, *also))}")


def check_task(setting: str, name: str) -> None:
    """Check that mteb has the task; raises the errors of `check_names`."""
    known = mteb_names()
    if known is None or name in known.tasks:
        return
    if (inputs := known.other_tasks.get(name)) is not None:
        raise ConfigError(
            f"{setting}: the task {name!r} has inputs of type {inputs}, but only tasks over texts "
            "are evaluated"
        )
    raise ConfigError(f"{setting}: {no_task(name, known.tasks)}")


def no_benchmark(name: str, known: Iterable[str]) -> str:
    """Build the error text for an unknown benchmark, with the nearest names or all names."""
    return f"there is no benchmark {name!r}; {nearest(name.partition('?')[0], known)}"


def no_task(name: str, known: Iterable[str]) -> str:
    """Build the error text for an unknown task, with the nearest names."""
    hint = nearest(name, known)
    # All of them, over a thousand, would tell nothing.
    hint = hint if hint.startswith("did you mean") else "mteb.get_tasks() lists all"
    return f"mteb has no task {name!r}; {hint}"
