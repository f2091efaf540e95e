"""Benchmarks by name beyond mteb's: some are groups of evaluation sets, others define their own
evaluation jobs.

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
from rayembed.config.run_evaluation import own_sets_of
from rayembed.config.settings import SettingsT, changed, nearest, parse
from rayembed.config.table import entry_points, from_outside
from rayembed.errors import ConfigError

_BROUGHT_BY: Mapping[str, str] = {"wikipedia": "rayembed_extras.wikipedia_sample"}
"""Benchmark named by a recipe of this package → the optional feature that provides it."""

ScoresT = TypeVar("ScoresT", bound=Scores)


class NamedBenchmark(Protocol):
    """Interface of a benchmark whose tasks are evaluated as own sets."""

    @property
    def name(self) -> str:
        """Name of the benchmark; settings may append sizes, as in `name?documents=300`."""
        ...

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that settings can select individually, in the order of result
        tables.
        """
        ...

    @property
    def prefix(self) -> str:
        """Prefix of the references of the benchmark's files, such as `sample://…/`."""
        ...

    @property
    def licence(self) -> str:
        """Licence of the benchmark's texts, as model hubs name it."""
        ...

    def own_sets(
        self, sizes: dict[str, str], tasks: Iterable[str] | None = None
    ) -> tuple[OwnSet, ...]:
        """Convert the selected tasks (None: all) to own sets of the given sizes.

        Raises:
            ConfigError: an unknown size.
        """
        ...

    def in_language(self, own: OwnSet, language: str) -> OwnSet | None:
        """Return one of the benchmark's sets in another language, by mteb's code (`fra-Latn`); None
        if it has no texts in that language.
        """
        ...

    def language_of(self, texts: Iterable[str]) -> str:
        """Detect the language of most of the texts, as mteb's code; empty if unknown or mixed."""
        ...

    def num_tokens(self, own: OwnSet) -> float:
        """Estimate the number of tokens in the texts of one of the benchmark's sets."""
        ...


class JobBenchmark(Protocol):
    """Interface of a benchmark that defines its own evaluation jobs. `Done` and `Job` are those of
    `evaluation.jobs`.
    """

    @property
    def name(self) -> str:
        """Name of the benchmark."""
        ...

    def jobs(self, run: EvaluationRun) -> Sequence[Any]:
        """Make the evaluation jobs; `finished(meta)` of each says whether all its texts are
        embedded already.

        Raises:
            ConfigError: it has nothing in the run's languages.
        """
        ...

    def keep(self, run: EvaluationRun, done: Sequence[Any]) -> None:
        """Write the result tables from the finished jobs, given as `Done` objects."""
        ...

    def scores(self, run: EvaluationRun, done: Sequence[Any]) -> Mapping[str, float]:
        """Compute the scores, by name, that can be computed without a remote leaderboard."""
        ...

    def report(self, run: EvaluationRun, done: Sequence[Any]) -> Sequence[str]:
        """Texts to print at the end of the evaluation."""
        ...

    def write_submission(self, storage: str, retriever: str) -> str:
        """Write the leaderboard's submission file into the storage, and return its path.

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
    """Names of the benchmarks that define their own evaluation jobs."""
    return tuple(sorted(_job_points()))


def job_benchmark(name: str, setting: str = "benchmarks") -> JobBenchmark:
    """Look up a benchmark that defines its own evaluation jobs.

    Args:
        setting: that names it, for messages.

    Raises:
        ConfigError: no such benchmark, or its package cannot be imported.
    """
    point = _job_points().get(name)
    if point is None:
        raise ConfigError(
            f"{setting}: no benchmark {name!r} defines its own evaluation jobs; "
            f"{nearest(name, _job_points())}"
        )
    return cast(JobBenchmark, from_outside(point))


def further_benchmark_names() -> tuple[str, ...]:
    """Names of the benchmarks that mteb does not have."""
    return (*job_benchmark_names(), *(benchmark.name for benchmark in named_benchmarks()))


def refuse_job_benchmarks(names: Iterable[str]) -> None:
    """Raise if a training run names a benchmark that only a separate evaluation can score.

    Raises:
        ConfigError: one brings its own jobs.
    """
    for name in names:
        if name in _job_points():
            raise ConfigError(
                f"evaluation.benchmarks names {name!r}, which cannot be scored in a training run; "
                f"score the trained model afterwards: evaluate_model --benchmark {name}"
            )


@cache
def named_benchmarks() -> tuple[NamedBenchmark, ...]:
    """All benchmarks whose tasks are evaluated as own sets.

    Raises:
        ConfigError: the package of one cannot be imported.
    """
    return tuple(from_outside(point) for point in entry_points("rayembed.benchmarks"))


def benchmark_of(reference: str) -> NamedBenchmark | None:
    """Look up the benchmark whose prefix a file's reference has; None for other files."""
    return next((b for b in named_benchmarks() if reference.startswith(b.prefix)), None)


def sets_to_choose(run: Run) -> tuple[OwnSet, ...]:
    """Evaluation sets from which the guard selects those that match the user's own data in language
    and kind; empty without a guard.

    Sets that name a language, and sets of the user's own, are not among them.
    """
    if run.evaluation.guard is None:
        return ()
    own = own_sets_of(run.evaluation.guard, run.evaluation)
    return tuple(
        one
        for one in run.evaluation.own_sets
        if one.name not in own
        and (benchmark := benchmark_of(one.path)) is not None
        and benchmark.in_language(one, "") is None
    )


def tokens_of_sets(sets: Iterable[OwnSet]) -> float:
    """Estimate the number of tokens in evaluation sets of named benchmarks; other sets
    count as 0.
    """
    known = [(benchmark_of(own.path), own) for own in sets]
    return sum(found.num_tokens(own) for found, own in known if found is not None)


def with_own_sets(scores: ScoresT) -> ScoresT:
    """Replace named benchmarks and their tasks in the settings of scores by equivalent own
    sets.

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
                f"benchmarks names {name!r}, which the package {_BROUGHT_BY[name]} provides, but "
                "this package is not installed here; install it, or name other benchmarks"
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
                f"own_sets: the name {own.name!r} is also the name of a task of "
                f"{', '.join(names)}, which is scored too; give your set another name, or remove "
                "the benchmark from `benchmarks`"
            )
    return changed(
        scores,
        benchmarks=tuple(b for b in scores.benchmarks if b.partition("?")[0] not in names),
        tasks=tuple(task for task in scores.tasks if task not in tasks),
        own_sets=(*found, *(own for own in scores.own_sets if own.name not in known)),
    )


def with_named_benchmarks(settings: SettingsT) -> SettingsT:
    """Replace named benchmarks in the settings of a run or an evaluation by equivalent own
    sets.

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
