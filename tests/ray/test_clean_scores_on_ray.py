"""The search of batch plans for test texts over a cluster finds what one process finds."""

import pytest
from planted_texts import plan_of, planted, text

from rayembed.data.engine.on_ray import execute_with_ray_data
from rayembed.data.engine.work_items import in_process
from rayembed_extras.clean_scores.search import TestTexts

pytestmark = pytest.mark.ray


def test_a_cluster_finds_what_one_process_finds(cluster, tmp_path):
    queries = [text(14) for _ in range(60)]
    plans = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        some = planted(queries[number * 10 : number * 10 + 10])
        plans.append(plan_of(tmp_path / str(number), some))
    found = []
    for name, execute in (("here", in_process), ("cluster", execute_with_ray_data)):
        texts = TestTexts(plans, str(tmp_path / name), execute)
        texts.add(queries)
        texts.search()
        found.append(texts.matches.tolist())
    assert found[0] == found[1]
    assert [way > 0 for way in found[0]] == [True] * 30 + [False] * 30
