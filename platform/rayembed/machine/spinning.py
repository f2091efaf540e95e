"""Limit how long a waiting thread of OpenMP keeps its core busy; it knows no torch."""

import os

SPIN_COUNT = {"GOMP_SPINCOUNT": "2000"}
"""Rounds for which a thread that waits for its peers spins, some 30 microseconds.

By itself GNU's OpenMP, which torch brings, spins for 300,000. Where another process needs the core,
the thread that is waited for gets none meanwhile: with one other process on two cores a training
step kept 26 % of its speed, with 2,000 rounds 43 %, without spinning 57 %, and on an idle machine
2,000 rounds lose 3 % and none lose 20 % (benchmarks/log/2026-11-30.md).
"""


def spin_environment() -> dict[str, str]:
    """Return the variable that limits spinning, unless the environment says how to wait."""
    named = os.environ.keys() & {"OMP_WAIT_POLICY", *SPIN_COUNT}
    return {} if named else SPIN_COUNT


def limit_spinning() -> None:
    """Set the limit for this process and those that it starts; where torch is loaded for those
    alone, since OpenMP reads it once.
    """
    os.environ.update(spin_environment())
