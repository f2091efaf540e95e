"""Importance of each searched setting for the score: fANOVA over a sweep's trials."""

import math
from collections.abc import Mapping

from rayembed_extras.sweeps.optuna_space import distribution, typed
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.trial_store import TrialRecord

LEAST_TRIALS = 4
"""Minimum number of trials; a random forest on fewer says nothing."""

RUN = "run"
"""Pseudo-setting for the choice between the sweep's runs."""


def importance(sweep: Sweep, records: Mapping[str, TrialRecord]) -> dict[str, float]:
    """Share of the score's variance that each setting explains (Hutter et al., 2014).

    Of finished trials: scores of trials that were ended early are of other steps. They add up to 1;
    empty where fewer than `LEAST_TRIALS` have finished, or all have the same score.
    """
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    domains = {path: distribution(domain) for path, domain in sweep.domains.items()}
    if len(sweep.runs) > 1:
        domains[RUN] = optuna.distributions.CategoricalDistribution(tuple(sweep.runs))
    finished = [
        (record, record.final.score)
        for record in records.values()
        if record.state == "finished" and record.final and math.isfinite(record.final.score)
    ]
    if len(finished) < LEAST_TRIALS or len({score for _, score in finished}) == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    for record, score in finished:
        params = {**typed(sweep.domains, record.values)}
        if RUN in domains:
            params[RUN] = record.label
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=domains, value=score)
        )
    found = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
    return {path: float(share) for path, share in found.items()}
