"""All that can be told of a sweep from its settings alone; needs no Ray."""

from rayembed.config.sweep import Sweep
from rayembed.tuning.trials import check_sweep, data_runs, known_trials


def check_all(sweep: Sweep) -> None:
    """Return when all settings of the sweep fit each other.

    Raises:
        ConfigError: which setting or which trial does not, and what to do.
    """
    check_sweep(sweep)
    if not known_trials(sweep):
        data_runs(sweep, [])
