"""Report a finished sweep: tables and plots, on disk and in MLflow."""

from collections.abc import Mapping

from rayembed.assets.storage import join, write_atomic
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.document import without_places
from rayembed.display.tables import console
from rayembed.pipeline.run.report import MLFLOW_AWAY, Outcome
from rayembed.registry.tracking import Tracker
from rayembed_extras.sweeps.optuna_space import LEAST_TRIALS, importance
from rayembed_extras.sweeps.plots import (
    differences_by_seed,
    importance_bars,
    parallel_coordinates,
    rows_with_spread,
)
from rayembed_extras.sweeps.results import (
    TrialRow,
    paper_table,
    percent,
    reference_of,
    rows_of,
    rows_table,
    trials_csv,
    trials_table,
)
from rayembed_extras.sweeps.settings import GridSearch, Sweep, metric_source
from rayembed_extras.sweeps.trial_store import SEED, TrialRecord, best

REPORT = "report.md"

Printed = Mapping[str, Mapping[str, float]]
"""A paper's scores: row → column → score in percent."""

_OF_SEEDS = (
    " All seeds are scored on the same held-out texts, so ± covers chance in training and not "
    "which queries are asked: with other queries all rows may score higher or lower."
)
"""Meaning of ± over seeds."""


def write_report(
    sweep: Sweep,
    records: Mapping[str, TrialRecord],
    files: StoredFolder,
    tracker: Tracker,
    printed: Printed,
    source: str,
) -> str:
    """Write the report, its tables and plots, also to MLflow; return the report's
    path in storage.
    """
    folder = files.local
    rows = rows_of(sweep, records)
    shares = importance(sweep, records)
    report = report_text(sweep, records, rows, shares, printed, source)
    write_atomic(folder / REPORT, report.encode())
    write_atomic(folder / "trials.csv", trials_csv(sweep, records).encode())
    names = [REPORT, "trials.csv", "parallel_coordinates.png"]
    parallel_coordinates(sweep, records, folder / "parallel_coordinates.png")
    if shares:
        importance_bars(shares, folder / "importance.png")
        names.append("importance.png")
    if _has_rows(sweep):
        rows_with_spread(rows, folder / "rows.png")
        names.append("rows.png")
        reference = reference_of(sweep, rows)
        if reference is not None and len(rows) > 1:
            differences_by_seed(rows, reference, folder / "differences.png")
            names.append("differences.png")
    for name in names:
        tracker.log_artifact(folder / name)
    return join(files.place, REPORT)


def report_text(
    sweep: Sweep,
    records: Mapping[str, TrialRecord],
    rows: list[TrialRow],
    shares: Mapping[str, float],
    printed: Printed,
    source: str,
) -> str:
    """Write the report's text in Markdown."""
    found = best(records)
    states = {
        state: sum(record.state == state for record in records.values())
        for state in ("finished", "stopped", "failed", "begun")
    }
    counts = ", ".join(f"{number} {state}" for state, number in states.items() if number)
    begun = " `begun` ones go on when the sweep is submitted again." if states["begun"] else ""
    parts = [
        f"# Sweep {sweep.name}\n",
        f"{len(records)} trials: {counts or 'none yet'}. Compared by {_metric(sweep)}; higher is "
        "better. `stopped` trials were ended by the scheduler, their score is the last one."
        f"{begun}\n",
    ]
    if found is not None and found.final is not None:
        shown = without_places(found.values)
        values = "".join(f"- `{path}={value}`\n" for path, value in shown.items())
        why = _of_the_best_row(rows, found) if SEED in sweep.domains else ""
        parts.append(f"## Best trial\n\n`{found.key}`: {found.final.score:.4f}{why}\n\n{values}")
    if _has_rows(sweep):
        reference = reference_of(sweep, rows)
        compared = reference is not None and len(rows) > 1
        exam = _OF_SEEDS if SEED in sweep.domains else ""
        parts.append(
            "## Rows\n\nMean ± standard deviation over the seeds (n − 1), 100 times the score."
            + exam
            + (_of_differences(sweep, reference) if reference is not None and compared else "")
            + "\n\n"
            + rows_table(rows, reference)
            + "\n![rows](rows.png)\n"
            + ("\n![differences](differences.png)\n" if compared else "")
        )
    if printed:
        parts.append(
            f"## Beside the paper\n\nThe figures of {source} are of its models, data and "
            "benchmarks; what is measured here is of the runs of this sweep. Only the differences "
            "between rows can be compared, and with small models, little data and few steps they "
            "may be other ones.\n\n" + paper_table(rows, printed)
        )
    parts.append("## Trials\n\n" + trials_table(sweep, records))
    parts.append("![parallel coordinates](parallel_coordinates.png)\n")
    if shares:
        lines = "".join(f"- `{path}`: {share:.1%}\n" for path, share in shares.items())
        parts.append(
            "## What decides the score\n\nShare of the variance of the score that each setting "
            f"explains (fANOVA over {states['finished']} finished trials).\n\n{lines}\n"
            "![importance](importance.png)\n"
        )
    else:
        parts.append(
            f"## What decides the score\n\nNot computed: it needs at least {LEAST_TRIALS} finished "
            "trials with different scores.\n"
        )
    return "\n".join(parts)


def print_swept(
    sweep: Sweep,
    records: Mapping[str, TrialRecord],
    report: str,
    outcome: Outcome | None,
    printed: Printed,
    source: str,
    *,
    mlflow_complete: bool,
) -> None:
    """Print the tables and the addresses of the results."""
    out = console(soft_wrap=True)
    rows = rows_of(sweep, records)
    out.print(
        rows_table(rows, reference_of(sweep, rows))
        if _has_rows(sweep)
        else trials_table(sweep, records)
    )
    if printed:
        out.print(f"Beside {source}:\n{paper_table(rows, printed)}")
    out.print(f"Report     {report}")
    if outcome is not None:
        version = outcome.version
        out.print(f"Best       {outcome.run.name}")
        out.print(f"Registry   {version.name} version {version.version} ({version.alias_uri})")
    if not mlflow_complete:
        out.print(MLFLOW_AWAY)


def _of_the_best_row(rows: list[TrialRow], found: TrialRecord) -> str:
    score = next(row.scores["score"] for row in rows if found in row.records)
    return (
        f". Settings are compared by their mean over the seeds: {percent(score)} for these, the "
        f"highest among those with as many finished trials as any ({score.number}); of these "
        "trials this one has the highest score"
    )


def _of_differences(sweep: Sweep, reference: TrialRow) -> str:
    drawn = not isinstance(sweep.search, GridSearch)
    flattered = " It was chosen by these scores, which flatters its lead." if drawn else ""
    return (
        f" Differences are to `{reference.name or 'the recipe'}`, seed by seed: mean, half-width "
        "of its 95 % interval (Student's t), and in how many seeds they are above 0. An interval "
        f"that holds 0 leaves open which of the two is better.{flattered}"
    )


def _has_rows(sweep: Sweep) -> bool:
    """Whether some row of the result table groups several trials, such as seeds."""
    return len(sweep.runs) > 1 or SEED in sweep.domains


def _metric(sweep: Sweep) -> str:
    weights = ", ".join(f"{task} × {weight:g}" for task, weight in sweep.metric.weights.items())
    if metric_source(sweep) == "validation":
        what = weights or "the runs' own deciding score"
        return f"validation on held-out texts ({what}) of the weights that a run hands on"
    return f"the held-out tasks after training ({weights or 'mean of the retrieval tasks'})"
