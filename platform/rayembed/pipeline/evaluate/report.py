"""Print the report of a finished evaluation."""

import shlex
from typing import TextIO

from rayembed.config.named_benchmarks import job_benchmark
from rayembed.display.tables import MISSING, Cell, Table, console
from rayembed.evaluation.averages import BY_LANGUAGE, averages, miracl_averages
from rayembed.evaluation.benchmarks import benchmark_tasks
from rayembed.evaluation.score import gain
from rayembed.pipeline.evaluate.evaluate import EvaluationResult
from rayembed.pipeline.evaluate.findings import print_findings
from rayembed.results.costs import cost_columns
from rayembed.results.scores import BM25_ROW, HYBRID, HYBRID_RERANKED, RERANKED


def benchmark_averages(evaluated: EvaluationResult) -> dict[str, dict[str, float]]:
    """Compute the averages by category and the overall mean of each mteb benchmark in the
    run.

    Of MIRACL: the languages that are scored, then the means over all 18 and over 16 of them.
    """
    found = {
        name: _by_language(name, evaluated)
        if name in BY_LANGUAGE
        else averages(name, _scores_in(name, evaluated))
        for name in evaluated.run.benchmarks
        if name not in evaluated.further
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
    """Score of each task on the benchmark's own splits and subsets, as far as they were
    evaluated.
    """
    tasks = {task.name: task for task in benchmark_tasks(benchmark)}
    found = {}
    for scoring in evaluated.scored.tasks:
        task = tasks.get(scoring.name)
        score = scoring.score if task is None else scoring.score_in(task)
        if score is not None:
            found[scoring.name] = score
    return found


def print_evaluated(evaluated: EvaluationResult, out: TextIO, *, tracking_uri: str) -> None:
    """Print scores by task, averages, failures, the location of files, and the command
    to run next.
    """
    printer = console(out, soft_wrap=True)
    if evaluated.scored.tasks:
        printer.print(evaluated_table(evaluated))
    for benchmark, values in benchmark_averages(evaluated).items():
        heads = ["Language" if benchmark in BY_LANGUAGE else "Category", "Average"]
        rows = [[name, Cell(value, digits=4)] for name, value in values.items()]
        title = f"Averages of {benchmark}"
        printer.print(Table(heads, rows, title=title, align="lr", look="open"))
    for name, done in evaluated.further.items():
        for text in job_benchmark(name).report(evaluated.run, done):
            printer.print(text)
    print_findings(evaluated.findings, out)
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
        printer.print("Next       run the same command again to compute only what is missing")
        return
    results = shlex.quote(evaluated.scored.results.rsplit("/results/", 1)[0])
    complete = list(benchmark_averages(evaluated))
    chosen = f" --benchmark {shlex.quote(complete[0])}" if complete else ""
    printer.print(f"Next       rayembed compare --results {results}{chosen}")


_ROWS = {
    BM25_ROW: "BM25",
    HYBRID: "hybrid with BM25",
    RERANKED: "reranked",
    HYBRID_RERANKED: "hybrid, reranked",
}
"""Labels of the rows below a task's own."""


def evaluated_table(evaluated: EvaluationResult) -> Table:
    """Tabulate each task's score and, below it, the baselines' scores with their paired differences
    from it.
    """
    scored = evaluated.scored
    rows: list[list[object]] = []
    costs = []
    for scoring in scored.tasks:
        metadata = scoring.factory.load().metadata
        seconds = Cell(scoring.seconds or None, gap="kept", digits=1)
        if scoring.score is None:
            seconds = Cell(None)
        score = Cell(scoring.score, digits=4)
        rows.append([scoring.name, metadata.type, metadata.main_score, score, "", seconds])
        costs.append(scored.cost(scoring))
        for name, beside in scored.further.items():
            found = [one for one in beside.tasks if one.name == scoring.name]
            for one in found:
                apart = ""
                if one.score is not None and scoring.score is not None:
                    apart = gain(beside, scored, [one.name]).shown(4)
                score = Cell(one.score, digits=4)
                rows.append([f"  {_ROWS[name]}", "", "", score, apart, ""])
                costs.append(beside.cost(one))
    columns = cost_columns(costs)
    for number, row in enumerate(rows):
        row += [texts[number] or MISSING for texts in columns.values()]
    heads = ["Task", "Type", "Metric", "Score", "Less the model", "Seconds", *columns]
    align = "lllrlr"
    if not scored.further:
        rows = [[*row[:4], *row[5:]] for row in rows]
        heads.remove("Less the model")
        align = "lllr"
    title = f"Scores of {scored.meta.name}"
    return Table(heads, rows, title=title, align=align, look="open")
