"""Settings of a run whose number of workers changes: what fits together, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayembed.config.override import override
from rayembed.config.placement import Placement, worker_numbers
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe


def run_of(pairs: int, **placement) -> Run:
    values = get_recipe("biencoder").model_dump(mode="json")
    values["stages"][0]["batch"]["global_pairs"] = pairs
    values["placement"] = placement
    return parse(Run, values)


def test_without_a_minimum_the_number_is_fixed():
    placement = Placement(workers=4)
    assert (placement.fewest_workers, placement.is_elastic) == (4, False)
    assert not Placement(workers=4, min_workers=4).is_elastic
    elastic = Placement(workers=4, min_workers=2)
    assert (elastic.fewest_workers, elastic.is_elastic) == (2, True)


def test_more_at_least_than_at_most_is_refused():
    with pytest.raises(ConfigError, match=r"min_workers 4 exceeds placement\.workers 2"):
        run_of(8, workers=2, min_workers=4)
    with pytest.raises(ConfigError, match=r"placement\.min_workers = '0'"):
        override(run_of(8), ["placement.min_workers=0"])


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 8))
def test_numbers_are_those_that_share_a_batch_equally(rows, fewest, more):
    shares = {n: len({len(range(w, rows, n)) for w in range(n)}) == 1 for n in range(1, 17)}
    expected = [n for n in range(fewest, fewest + more + 1) if shares[n] and n <= rows]
    assert list(worker_numbers(rows, fewest, fewest + more)) == expected


def test_both_ends_must_share_the_batch_and_numbers_between_need_not():
    assert run_of(256, workers=8, min_workers=1).placement.is_elastic
    assert worker_numbers(256, 1, 8) == (1, 2, 4, 8)
    with pytest.raises(
        ConfigError,
        match=r"batch\.global_pairs 256 cannot be shared equally by placement\.min_workers 3; "
        r"possible numbers of workers up to 8 are 1, 2, 4, 8: set",
    ):
        run_of(256, workers=8, min_workers=3)
    with pytest.raises(
        ConfigError,
        match=r"placement\.workers 6; possible numbers of workers up to 6 are 1, 2, 4:",
    ):
        run_of(256, workers=6, min_workers=2)


def test_the_number_of_workers_is_no_part_of_what_a_run_is():
    fixed, elastic = run_of(256, workers=2), run_of(256, workers=8, min_workers=1)
    assert fixed.fingerprint == elastic.fingerprint
    assert fixed.fingerprint != run_of(128, workers=2).fingerprint
