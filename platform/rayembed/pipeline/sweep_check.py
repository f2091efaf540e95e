"""All that can be told of a sweep from its settings alone; needs no Ray."""

from rayembed.config.sweep import Sweep
from rayembed.data.prepare import check_negatives
from rayembed.tuning.trials import check_sweep, data_runs, known_trials


def check_all(sweep: Sweep) -> None:
    """Return when all settings of the sweep fit each other.

    Raises:
        ConfigError: which setting or which trial does not, and what to do.
    """
    check_sweep(sweep)
    runs = [trial.run for trial in known_trials(sweep)]
    for run in runs or data_runs(sweep, runs):
        check_negatives(run)
