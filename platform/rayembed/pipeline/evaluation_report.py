"""The report of an evaluation that is done."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rayembed.config.evaluation_run import EvaluationPlacement, EvaluationRun
from rayembed.evaluation.air_bench.catalogue import VERSIONS
from rayembed.evaluation.air_bench.scores import dev_file, dev_markdown, read_dev_scores
from rayembed.evaluation.averages import averages, miracl_averages
from rayembed.evaluation.benchmark_lines import BY_LANGUAGE
from rayembed.evaluation.benchmarks import benchmark_tasks
from rayembed.pipeline.evaluate import EvaluationResult
from rayembed.tables import Cell, Table, console

if TYPE_CHECKING:
    from rich.console import Console


def benchmark_averages(evaluated: EvaluationResult) -> dict[str, dict[str, float]]:
    """Benchmark → category or mean → average, of those of mteb's benchmarks that were run.

    Of MIRACL: the languages that are scored, then the means over all 18 and over 16 of them.
    """
    found = {
        name: _by_language(name, evaluated)
        if name in BY_LANGUAGE
        else averages(name, _scores_in(name, evaluated))
        for name in evaluated.run.benchmarks
        if name not in VERSIONS
    }
    return {name: values for name, values in found.items() if values}


def _by_language(benchmark: str, evaluated: EvaluationResult) -> dict[str, float]:
    names = {task.name for task in benchmark_tasks(benchmark)}
    scores: dict[str, float] = {}
    for scoring in evaluated.scored.tasks:
        if scoring.name in names:
            scores |= scoring.by_subset()
    return scores | miracl_averages(scores)


def _scores_in(benchmark: str, evaluated: EvaluationResult) -> dict[str, float]:
    """Score by task on the benchmark's own splits and subsets, of those that were asked for."""
    tasks = {task.name: task for task in benchmark_tasks(benchmark)}
    found = {}
    for scoring in evaluated.scored.tasks:
        task = tasks.get(scoring.name)
        score = scoring.score if task is None else scoring.score_in(task)
        if score is not None:
            found[scoring.name] = score
    return found


def print_evaluated(evaluated: EvaluationResult, out: TextIO, *, tracking_uri: str) -> None:
    """Print scores by task, averages, what failed, where the files are, what to run next."""
    printer = console(out, soft_wrap=True)
    if evaluated.scored.tasks:
        printer.print(_scores_table(evaluated))
    for benchmark, values in benchmark_averages(evaluated).items():
        heads = ["Language" if benchmark in BY_LANGUAGE else "Category", "Average"]
        rows = [[name, Cell(value, digits=4)] for name, value in values.items()]
        title = f"Averages of {benchmark}"
        printer.print(Table(heads, rows, title=title, align="lr", look="open"))
    _print_air_bench(evaluated, printer)
    if evaluated.failed:
        printer.print(
            Table(["Task", "Reason"], evaluated.failed, title="Without a score", look="open")
        )
    printer.print(
        f"Model      {evaluated.scored.meta.name} at revision {evaluated.scored.meta.revision}"
    )
    printer.print(f"Results    {evaluated.scored.results}")
    if tracking_uri.startswith("http"):
        printer.print(f"MLflow     {tracking_uri}")
    else:
        printer.print(f"MLflow     mlflow ui --backend-store-uri {shlex.quote(tracking_uri)}")
    if evaluated.failed:
        printer.print("Next       the same command again does what is missing, and nothing else")
        return
    results = shlex.quote(evaluated.scored.results.rsplit("/results/", 1)[0])
    complete = list(benchmark_averages(evaluated))
    chosen = f" --benchmark {shlex.quote(complete[0])}" if complete else ""
    printer.print(f"Next       python jobs/compare_models.py --results {results}{chosen}")


def _scores_table(evaluated: EvaluationResult) -> Table:
    rows = []
    for scoring in evaluated.scored.tasks:
        metadata = scoring.factory.load().metadata
        seconds = Cell(scoring.seconds or None, gap="kept", digits=1)
        if scoring.score is None:
            seconds = Cell(None)
        score = Cell(scoring.score, digits=4)
        rows.append([scoring.name, metadata.type, metadata.main_score, score, seconds])
    return Table(
        ["Task", "Type", "Metric", "Score", "Seconds"],
        rows,
        title=f"Scores of {evaluated.scored.meta.name}",
        align="lllr",
        look="open",
    )


def _print_air_bench(evaluated: EvaluationResult, printer: "Console") -> None:
    """Print AIR-Bench's dev scores, and how to submit the rest."""
    for version in dict.fromkeys(entry.job.dataset.version for entry in evaluated.air_bench):
        entries = [e for e in evaluated.air_bench if e.job.dataset.version == version]
        done = [e for e in entries if e.outcome is not None]
        printer.print(f"{version}: results of {len(done)} of {len(entries)} data sets")
        if not done:
            continue
        folder, retriever = done[0].job.folder, done[0].retriever
        if any("dev" in entry.job.dataset.splits for entry in done):
            printer.print(dev_markdown([read_dev_scores(folder, version, retriever)]))
            printer.print(f"Dev scores {dev_file(folder, version, retriever)}")
        printer.print(
            "Test scores come from the leaderboard alone: "
            f"python jobs/evaluate_model.py --submission {shlex.quote(version)} "
            f"--retriever {shlex.quote(retriever)}{_set_storage(evaluated.run)}"
        )


def _set_storage(run: EvaluationRun) -> str:
    """The option that names the storage in a further command; empty for the default."""
    storage = run.placement.storage_path
    default = EvaluationPlacement().storage_path
    if storage in (default, str(Path(default).absolute())):
        return ""
    return f" --set {shlex.quote(f'placement.storage_path={storage}')}"
