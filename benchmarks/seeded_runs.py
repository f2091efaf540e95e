"""Recipes trained with several seeds each, and a table of their held-out scores with spread.

Each run is a training job of its own. One that is finished is not run again, one that was stopped
goes on; the table is made of the seeds that all recipes have.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.recipes.catalogue import get_recipe
from rayembed_papers.spread import SpreadTable, spread_csv, spread_markdown, spread_table

JOBS = Path(__file__).resolve().parents[1] / "jobs"

UNTRAINED, TRAINED = "untrained", "trained"


@dataclass(frozen=True)
class Comparison:
    """What is trained, and which of its scores stand in which row."""

    name: str
    """Of the folder that the table lies in."""
    job: str
    """File among the jobs."""
    recipes: Mapping[str, str]
    """Label → recipe."""
    rows: Mapping[str, tuple[str, str]]
    """Row → label of a recipe, and which of its scores: `UNTRAINED`, `TRAINED` or the label that
    the run's own table has."""
    base: str
    """The row that gains are taken from."""
    corner: str
    """Heading of the rows."""
    verdicts: Callable[[SpreadTable], Sequence[str]]
    """What the table says, in lines."""
    baselines: tuple[str, ...] = ()
    """References of models that are scored beside the untrained one."""

    def run_of(self, label, seed, given):
        """The run of a recipe by a seed, and its settings as on the command line."""
        untrained = {name for name, which in self.rows.values() if which == UNTRAINED}
        assignments = [
            f"name={self.recipes[label]}-seed{seed}",
            f"seed={seed}",
            f"evaluation.baselines={json.dumps(self.baselines if label in untrained else ())}",
            f"evaluation.before_training={'true' if label in untrained else 'false'}",
            *given,
        ]
        return override(get_recipe(self.recipes[label]), assignments), assignments


def read_scores(run):
    """Scores of a finished run by label; None: it is not finished, or was scored otherwise."""
    folder = Path(run.placement.storage_path) / "runs" / run.name
    path = folder / "scores.csv"
    if not path.exists() or not (folder / "run.yaml").exists():
        return None
    kept = Run.read(folder / "run.yaml")
    if (kept.fingerprint, kept.evaluation) != (run.fingerprint, run.evaluation):
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = {row.pop("model"): row for row in csv.DictReader(file)}
    stages = [label for label in rows if label.startswith("stage ")]
    if len(stages) != len(run.stages):
        return None
    scores = {label: {k: float(v) for k, v in row.items() if v} for label, row in rows.items()}
    return scores | {TRAINED: scores[stages[-1]]}


def train_missing(comparison, seeds, given):
    """Whether all runs are finished, after those that were not were run."""
    whole = True
    for seed in seeds:
        for label, recipe in comparison.recipes.items():
            run, assignments = comparison.run_of(label, seed, given)
            if read_scores(run) is not None:
                print(f"{label}, seed {seed}: finished already", flush=True)
                continue
            print(f"{label}, seed {seed}: runs", flush=True)
            settings = [part for one in assignments for part in ("--set", one)]
            command = [sys.executable, str(JOBS / comparison.job), "--recipe", recipe, *settings]
            if subprocess.run(command, check=False).returncode:
                print(f"{label}, seed {seed}: failed, see above", file=sys.stderr, flush=True)
                whole = False
    return whole


def table_of(comparison, seeds, given):
    """The table of the seeds that all recipes have scores of, and these seeds."""
    found = {
        (label, seed): read_scores(comparison.run_of(label, seed, given)[0])
        for label in comparison.recipes
        for seed in seeds
    }
    complete = [
        s for s in seeds if all(found[label, s] is not None for label in comparison.recipes)
    ]
    rows = {}
    for row, (label, which) in comparison.rows.items():
        scores = [found[label, seed][which] for seed in complete]
        rows[row] = {task: [one[task] for one in scores] for task in (scores or [{}])[0]}
    return SpreadTable(rows, base=comparison.base), complete


def main(comparison, about, arguments=None):
    """Train what is missing, print and write the table; the exit code."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--only-table", action="store_true", help="of finished runs; run nothing")
    parser.add_argument("--set", dest="given", action="append", default=[], metavar="path=value")
    args = parser.parse_args(arguments)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    whole = args.only_table or train_missing(comparison, seeds, args.given)
    table, complete = table_of(comparison, seeds, args.given)
    if not complete:
        count = len(comparison.recipes)
        print(f"no seed has finished runs of all {count} recipes", file=sys.stderr)
        return 1
    run, _ = comparison.run_of(next(iter(comparison.recipes)), seeds[0], args.given)
    folder = Path(run.placement.storage_path) / comparison.name
    folder.mkdir(parents=True, exist_ok=True)
    said = comparison.verdicts(table)
    steps = sum(stage.steps for stage in run.stages)
    about = f"{steps} steps, seeds {', '.join(map(str, complete))}"
    text = f"{spread_markdown(table, comparison.corner)}\n{about}. " + "\n".join(["", *said]) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / "table.csv").write_text(spread_csv(table, comparison.corner), encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
    console.print(spread_table(table, comparison.corner, title=f"{about}; mean ± deviation, gain"))
    for line in said:
        print(line)
    print(f"Written  {folder / 'table.md'}, {folder / 'table.csv'}")
    left = [str(seed) for seed in seeds if seed not in complete]
    if left:
        print(f"Not complete: seeds {', '.join(left)}; the same command goes on", file=sys.stderr)
    return 0 if whole and not left else 1
