"""Create Ray Tune's searcher and scheduler for a sweep, with the scores of earlier submissions."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import ASHAScheduler

from rayembed_extras.sweeps.optuna_space import distribution, typed
from rayembed_extras.sweeps.settings import AshaScheduler, OptunaSearch, Sweep
from rayembed_extras.sweeps.trial_store import TrialRecord
from rayembed_extras.sweeps.trials import counted

SCORE, STEP = "score", "global_step"
"""Result keys of the score and the step."""


def searcher(sweep: Sweep, past: Sequence[TrialRecord]) -> Any:
    """Create the Optuna searcher, given the scores of earlier trials; None if trials are listed in
    advance.

    Trials that had begun and not ended are its first ones.

    Args:
        past: trials of earlier submissions.
    """
    if not isinstance(sweep.search, OptunaSearch):
        return None
    import optuna
    from ray.tune.search.optuna import OptunaSearch as Searcher

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    domains = sweep.domains
    ended = [record for record in past if record.is_done and record.has_score]
    begun = [r for r in past if not r.is_done and r.values.keys() == domains.keys()]
    found = Searcher(
        {path: distribution(domain) for path, domain in domains.items()},
        metric=SCORE,
        mode="max",
        seed=sweep.search.seed + len(ended),
        points_to_evaluate=[typed(domains, record.values) for record in begun] or None,
    )
    for record in ended:
        found.add_evaluated_point(typed(domains, record.values), record.score)
    return found


def asha(sweep: Sweep, done: Sequence[TrialRecord], total: int) -> ASHAScheduler | None:
    """Create the ASHA scheduler, given the scores of earlier trials; None if every trial runs to
    its end.

    Args:
        done: trials that have ended before.
        total: steps of a trial.
    """
    settings = sweep.scheduler
    if not isinstance(settings, AshaScheduler):
        return None
    grace = settings.grace_steps
    if grace is None:
        runs = map(counted, sweep.runs.values())
        grace = min(max(run.validation_interval(run.stages[0]) for run in runs), total)
    found = ASHAScheduler(
        time_attr=STEP,
        metric=SCORE,
        mode="max",
        max_t=max(total - 1, grace),  # at the last step nothing is saved by ending a trial
        grace_period=grace,
        reduction_factor=settings.reduction_factor,
        stop_last_trials=False,
    )
    reports = [(report, SimpleNamespace(trial_id=r.key)) for r in done for report in r.reports]
    for trial in {past.trial_id: past for _, past in reports}.values():
        found.on_trial_add(None, trial)
    for report, trial in sorted(reports, key=lambda pair: pair[0].time):
        found.on_trial_result(None, trial, {STEP: report.global_step, SCORE: report.score})
    return found
