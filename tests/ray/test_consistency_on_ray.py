"""The consistency filter on a cluster: killed processes change nothing."""

from pathlib import Path

import pytest
from filters_on_ray import killed_and_whole

pytestmark = pytest.mark.ray


def test_killed_processes_change_nothing(cluster, tmp_path: Path) -> None:
    settings = {"consistency": {"teacher": "small", "shard_rows": 15}}
    killed = killed_and_whole(tmp_path, settings, {"RankShard", "KeepConsistent"})
    assert 0 < killed[1].manifest["rows_out"] < killed[1].manifest["rows_in"] == 59
