"""Convert a search space to Optuna distributions, and trials to a study that measures the
importance of settings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.space import Domain
from rayembed_extras.sweeps.trial_store import TrialRecord

LEAST_TRIALS = 4
"""Minimum number of trials for a meaningful random forest."""

RUN = "run"
"""Pseudo-setting for the choice between the sweep's runs."""


def distribution(domain: Domain) -> Any:
    """Convert a setting's domain to an Optuna distribution."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if domain.is_finite:
        return CategoricalDistribution(domain.values)
    if domain.kind == "integers":
        return IntDistribution(int(domain.low), int(domain.high))
    return FloatDistribution(domain.low, domain.high, log=domain.kind == "loguniform")


def typed(domains: Mapping[str, Domain], values: Mapping[str, str]) -> dict[str, Any]:
    """Convert values of numeric domains to numbers; others remain texts."""
    return {
        path: text if domain.is_finite else (int if domain.kind == "integers" else float)(text)
        for path, domain in domains.items()
        for text in (values[path],)
    }


def texts(domains: Mapping[str, Domain], values: Mapping[str, Any]) -> dict[str, str]:
    """Convert values back to texts, the inverse of `typed`."""
    return {
        path: str(values[path]) if domain.is_finite else domain.text(values[path])
        for path, domain in domains.items()
    }


def study_of(sweep: Sweep, records: Sequence[TrialRecord]) -> Any:
    """Create an Optuna study of the scored trials, with settings as parameters, and the run too if
    there are several.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    domains = {path: distribution(domain) for path, domain in sweep.domains.items()}
    if len(sweep.runs) > 1:
        domains[RUN] = optuna.distributions.CategoricalDistribution(tuple(sweep.runs))
    study = optuna.create_study(direction="maximize")
    for record in records:
        params = typed(sweep.domains, record.values)
        if RUN in domains:
            params[RUN] = record.label
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=domains, value=record.score)
        )
    return study


def importance(sweep: Sweep, records: Mapping[str, TrialRecord]) -> dict[str, float]:
    """Share of the score's variance that each setting explains (Hutter et al., 2014).

    Of finished trials: scores of trials that were ended early are of other steps. They add up to 1;
    empty where fewer than `LEAST_TRIALS` have finished, or all have the same score.
    """
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    finished = [r for r in records.values() if r.state == "finished" and r.has_score]
    if len(finished) < LEAST_TRIALS or len({record.score for record in finished}) == 1:
        return {}
    evaluator = FanovaImportanceEvaluator(seed=0)
    found = get_param_importances(study_of(sweep, finished), evaluator=evaluator)
    return {path: float(share) for path, share in found.items()}
