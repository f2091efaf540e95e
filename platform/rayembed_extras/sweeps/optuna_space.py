"""Optuna distributions of a space's domains, and conversion of its values."""

from collections.abc import Mapping
from typing import Any

from rayembed_extras.sweeps.space import Domain


def distribution(domain: Domain) -> Any:
    """Optuna's distribution of a domain."""
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
    """Values as numbers for numeric domains, else as texts."""
    return {
        path: text if domain.is_finite else (int if domain.kind == "integers" else float)(text)
        for path, domain in domains.items()
        for text in (values[path],)
    }


def texts(domains: Mapping[str, Domain], values: Mapping[str, Any]) -> dict[str, str]:
    """Inverse of `typed`."""
    return {
        path: str(values[path]) if domain.is_finite else domain.text(values[path])
        for path, domain in domains.items()
    }
