"""Cleaning with near-duplicates on a cluster: killed processes change nothing."""

from pathlib import Path

import pytest
from filters_on_ray import killed_and_whole

pytestmark = pytest.mark.ray


def test_killed_processes_change_nothing(cluster, tmp_path: Path) -> None:
    near = {"threshold": 0.7, "ngram": 2}
    cleaning = {"near_duplicates": near, "overlap": {"tasks": ["evaluation.txt"]}}
    (killed,) = killed_and_whole(tmp_path, {"cleaning": cleaning}, {"BandPart", "FindOverlap"})
    assert killed.manifest["dropped"] == {"near-duplicate": 9, "text of a benchmark": 5}
