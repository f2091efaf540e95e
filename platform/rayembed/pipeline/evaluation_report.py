"""The report of an evaluation that is done."""

import shlex
from pathlib import Path
from typing import TextIO

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from rayembed.config.evaluation_run import EvaluationPlacement, EvaluationRun
from rayembed.evaluation.air_bench.scores import dev_file, dev_markdown, read_dev_scores
from rayembed.evaluation.averages import averages, miracl_averages
from rayembed.evaluation.benchmark_lines import BY_LANGUAGE
from rayembed.evaluation.benchmarks import benchmark_names, benchmark_tasks
from rayembed.evaluation.tables import MISSING
from rayembed.pipeline.evaluate import Evaluated

WIDTH = 120


def benchmark_averages(evaluated: Evaluated) -> dict[str, dict[str, float]]:
    """Benchmark → category or mean → average, of those of mteb's benchmarks that were run.

    Of MIRACL: the languages that are scored, then the means over all 18 and over 16 of them.
    """
    known = set(benchmark_names())
    found = {
        name: _by_language(name, evaluated)
        if name in BY_LANGUAGE
        else averages(name, _scores_in(name, evaluated))
        for name in evaluated.run.benchmarks
        if name in known
    }
    return {name: values for name, values in found.items() if values}


def _by_language(benchmark: str, evaluated: Evaluated) -> dict[str, float]:
    names = {task.name for task in benchmark_tasks(benchmark)}
    scores: dict[str, float] = {}
    for scoring in evaluated.scored.tasks:
        if scoring.name in names:
            scores |= scoring.by_subset()
    return scores | miracl_averages(scores)


def _scores_in(benchmark: str, evaluated: Evaluated) -> dict[str, float]:
    """Score by task on the benchmark's own splits and subsets, of those that were asked for."""
    tasks = {task.name: task for task in benchmark_tasks(benchmark)}
    found = {}
    for scoring in evaluated.scored.tasks:
        task = tasks.get(scoring.name)
        score = scoring.score if task is None else scoring.score_in(task)
        if score is not None:
            found[scoring.name] = score
    return found


def print_evaluated(evaluated: Evaluated, out: TextIO, *, tracking_uri: str) -> None:
    """Print scores by task, averages, what failed, where the files are, what to run next."""
    console = Console(file=out, width=WIDTH, soft_wrap=True, highlight=False)
    if evaluated.scored.tasks:
        console.print(_scores_table(evaluated))
    for benchmark, values in benchmark_averages(evaluated).items():
        table = _table(f"Averages of {benchmark}")
        table.add_column("Language" if benchmark in BY_LANGUAGE else "Category")
        table.add_column("Average", justify="right")
        for name, value in values.items():
            table.add_row(name, f"{value:.4f}")
        console.print(table)
    _print_air_bench(evaluated, console)
    if evaluated.failed:
        table = _table("Without a score")
        table.add_column("Task")
        table.add_column("Reason", overflow="fold")
        for name, error in evaluated.failed:
            table.add_row(name, str(error))
        console.print(table)
    console.print(
        f"Model      {evaluated.scored.meta.name} at revision {evaluated.scored.meta.revision}"
    )
    console.print(f"Results    {evaluated.scored.results}")
    if tracking_uri.startswith("http"):
        console.print(f"MLflow     {tracking_uri}")
    else:
        console.print(f"MLflow     mlflow ui --backend-store-uri {tracking_uri}")
    if evaluated.failed:
        console.print("Next       the same command again does what is missing, and nothing else")
        return
    results = evaluated.scored.results.rsplit("/results/", 1)[0]
    complete = list(benchmark_averages(evaluated))
    chosen = f" --benchmark {shlex.quote(complete[0])}" if complete else ""
    console.print(f"Next       python jobs/compare_models.py --results {results}{chosen}")


def _scores_table(evaluated: Evaluated) -> Table:
    table = _table(f"Scores of {evaluated.scored.meta.name}")
    table.add_column("Task")
    table.add_column("Type")
    table.add_column("Metric")
    table.add_column("Score", justify="right")
    table.add_column("Seconds", justify="right")
    for scoring in evaluated.scored.tasks:
        metadata = scoring.factory.load().metadata
        score, seconds = MISSING, MISSING
        if scoring.score is not None:
            score = f"{scoring.score:.4f}"
            seconds = f"{scoring.seconds:.1f}" if scoring.seconds else "kept"
        table.add_row(scoring.name, metadata.type, metadata.main_score, score, seconds)
    return table


def _print_air_bench(evaluated: Evaluated, console: Console) -> None:
    """Print AIR-Bench's dev scores, and how to submit the rest."""
    for version in dict.fromkeys(entry.job.dataset.version for entry in evaluated.air_bench):
        entries = [e for e in evaluated.air_bench if e.job.dataset.version == version]
        done = [e for e in entries if e.outcome is not None]
        console.print(f"{version}: results of {len(done)} of {len(entries)} data sets")
        if not done:
            continue
        folder, retriever = done[0].job.folder, done[0].retriever
        if any("dev" in entry.job.dataset.splits for entry in done):
            console.print(dev_markdown([read_dev_scores(folder, version, retriever)]))
            console.print(f"Dev scores {dev_file(folder, version, retriever)}")
        console.print(
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


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=HORIZONTALS, show_edge=False, pad_edge=False
    )
