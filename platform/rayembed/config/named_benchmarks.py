"""Benchmarks that are named among mteb's: some stand for own sets, some bring their own jobs.

A `NamedBenchmark` is made of files that need no hub; other packages add theirs by entry points of
the group `rayembed.benchmarks`. The settings that a run is made with have the sets in place of the
names, so that nothing behind them knows a benchmark by its name.

A `JobBenchmark` is scored by jobs that are no tasks of mteb; entry points of the group
`rayembed.job_benchmarks` are named as the benchmarks.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import parse_qsl

from rayembed.config.evaluation import EvaluationRun
from rayembed.config.own_sets import OwnSet, Scores
from rayembed.config.run import Run
from rayembed.config.settings import SettingsT, changed, nearest, parse
from rayembed.config.table import entry_points, from_outside
from rayembed.errors import ConfigError

_BROUGHT_BY: Mapping[str, str] = {"wikipedia": "rayembed_extras.wikipedia_sample"}
"""Benchmark that recipes of this package name → the optional feature that brings it."""

ScoresT = TypeVar("ScoresT", bound=Scores)


class NamedBenchmark(Protocol):
    """A benchmark whose tasks are own sets."""

    @property
    def name(self) -> str:
        """Its name among benchmarks; sizes may follow, `name?documents=300`."""
        ...

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that may be named alone, in the order in which tables show them."""
        ...

    @property
    def prefix(self) -> str:
        """How the references of its files begin, `sample://…/`."""
        ...

    @property
    def licence(self) -> str:
        """Licence of its texts, as hubs name it."""
        ...

    def own_sets(
        self, sizes: dict[str, str], tasks: Iterable[str] | None = None
    ) -> tuple[OwnSet, ...]:
        """Its tasks of these sizes; None: all of them.

        Raises:
            ConfigError: an unknown size.
        """
        ...

    def in_language(self, own: OwnSet, language: str) -> OwnSet | None:
        """One of its sets in a language, of mteb's codes (`fra-Latn`); itself where it names a
        language, None where there are no such texts.
        """
        ...

    def num_tokens(self, own: OwnSet) -> float:
        """About how many tokens the texts of one of its sets have."""
        ...


class JobBenchmark(Protocol):
    """A benchmark that brings its own jobs. `Done` and `Job` are those of `evaluation.jobs`."""

    @property
    def name(self) -> str:
        """Its name among benchmarks."""
        ...

    def jobs(self, run: EvaluationRun) -> Sequence[Any]:
        """Its jobs; each also has `finished(meta)`: whether it has nothing left to embed.

        Raises:
            ConfigError: it has nothing in the run's languages.
        """
        ...

    def keep(self, run: EvaluationRun, done: Sequence[Any]) -> None:
        """Write tables of what is done, from the `Done` of each job."""
        ...

    def scores(self, run: EvaluationRun, done: Sequence[Any]) -> Mapping[str, float]:
        """Name → score, of those that can be computed here."""
        ...

    def report(self, run: EvaluationRun, done: Sequence[Any]) -> Sequence[str]:
        """Texts that are printed at the end."""
        ...

    def write_submission(self, storage: str, retriever: str) -> str:
        """Write the file for its leaderboard into the storage, and return its path.

        Args:
            retriever: name of the model in the results.

        Raises:
            ArtifactError: results are missing or wrong.
        """
        ...


@cache
def _job_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points("rayembed.job_benchmarks")}


def job_benchmark_names() -> tuple[str, ...]:
    """Names of the benchmarks that bring their own jobs."""
    return tuple(sorted(_job_points()))


def job_benchmark(name: str, setting: str = "benchmarks") -> JobBenchmark:
    """A benchmark that brings its own jobs.

    Args:
        setting: that names it, for messages.

    Raises:
        ConfigError: no such benchmark, or its package cannot be imported.
    """
    point = _job_points().get(name)
    if point is None:
        raise ConfigError(f"{setting}: {name!r} has none; {nearest(name, _job_points())}")
    return cast(JobBenchmark, from_outside(point))


def further_benchmark_names() -> tuple[str, ...]:
    """Names of the benchmarks that are not mteb's."""
    return (*job_benchmark_names(), *(benchmark.name for benchmark in named_benchmarks()))


def refuse_job_benchmarks(names: Iterable[str]) -> None:
    """Return when a training run can be scored on all of the benchmarks.

    Raises:
        ConfigError: one brings its own jobs.
    """
    for name in names:
        if name in _job_points():
            raise ConfigError(
                f"evaluation.benchmarks names {name!r}, which a training run does not take; score "
                f"its model afterwards: evaluate_model --benchmark {name}"
            )


@cache
def named_benchmarks() -> tuple[NamedBenchmark, ...]:
    """All of them.

    Raises:
        ConfigError: the package of one cannot be imported.
    """
    return tuple(from_outside(point) for point in entry_points("rayembed.benchmarks"))


def benchmark_of(reference: str) -> NamedBenchmark | None:
    """The benchmark that a file belongs to, by its reference; None: to none."""
    return next((b for b in named_benchmarks() if reference.startswith(b.prefix)), None)


def tokens_of_sets(sets: Iterable[OwnSet]) -> float:
    """About how many tokens the texts of the benchmarks' sets have; other sets are not counted."""
    known = [(benchmark_of(own.path), own) for own in sets]
    return sum(found.num_tokens(own) for found, own in known if found is not None)


def with_own_sets(scores: ScoresT) -> ScoresT:
    """The scores with own sets in place of the benchmarks' names and of their tasks' names.

    Raises:
        ConfigError: an unknown size, a benchmark whose package is not here, or a set of the user's
            own with the name of a task.
    """
    found: list[OwnSet] = []
    names = {benchmark.name: benchmark for benchmark in named_benchmarks()}
    tasks = {task: benchmark for benchmark in names.values() for task in benchmark.tasks}
    for asked in scores.benchmarks:
        name, _, sizes = asked.partition("?")
        if name in names:
            found += names[name].own_sets(dict(parse_qsl(sizes)))
        elif name in _BROUGHT_BY:
            raise ConfigError(
                f"benchmarks names {name!r}, which {_BROUGHT_BY[name]} brings, and that is not "
                "installed here; install it, or name other benchmarks"
            )
    known = {own.name for own in found}
    for benchmark in names.values():
        alone = [task for task in scores.tasks if tasks.get(task) is benchmark]
        found += [own for own in benchmark.own_sets({}, alone) if own.name not in known]
    if not found:
        return scores
    known = {own.name for own in found}
    for own in scores.own_sets:
        if own.name in known and benchmark_of(own.path) is None:
            raise ConfigError(
                f"own_sets: {own.name!r} is the name of a task of {', '.join(names)}, which is "
                "scored too; give your set another name, or take the benchmark out of benchmarks"
            )
    return changed(
        scores,
        benchmarks=tuple(b for b in scores.benchmarks if b.partition("?")[0] not in names),
        tasks=tuple(task for task in scores.tasks if task not in tasks),
        own_sets=(*found, *(own for own in scores.own_sets if own.name not in known)),
    )


def with_named_benchmarks(settings: SettingsT) -> SettingsT:
    """The settings of a run or an evaluation with own sets in place of benchmarks' names.

    Raises:
        ConfigError: an unknown size of a benchmark, or its sets do not fit the run.
    """
    if isinstance(settings, Scores):
        return with_own_sets(settings)
    if isinstance(settings, Run):
        evaluation = with_own_sets(settings.evaluation)
        if evaluation is not settings.evaluation:
            return parse(type(settings), {**dict(settings), "evaluation": evaluation})
    return settings
