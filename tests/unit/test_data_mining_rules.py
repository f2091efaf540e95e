"""Rules, near-duplicates and turns by themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mining_step import configured

from rayembed.data.mining.candidates import (
    is_near_duplicate,
    round_robin,
    select_negatives,
    trigrams,
)


@pytest.mark.parametrize(
    ("rule", "positive", "limit"),
    [
        ({"kind": "top_k"}, 0.5, np.inf),
        ({"kind": "top_k_abs", "max_score": 0.6}, 0.9, 0.6),
        ({"kind": "top_k_margin_pos", "margin": 0.1}, 0.9, 0.8),
        ({"kind": "top_k_margin_pos", "margin": 0.1}, -0.2, -0.3),
        ({"kind": "top_k_perc_pos"}, 0.8, 0.76),
        ({"kind": "top_k_perc_pos"}, 0.0, 0.0),
        ({"kind": "top_k_perc_pos"}, -0.2, -0.21),
    ],
)
def test_highest_score(rule, positive, limit) -> None:
    found = configured(rule=rule).rule.highest_scores(np.array([positive]))
    assert found == pytest.approx([limit])


def test_near_duplicates_by_trigrams_without_case_and_punctuation() -> None:
    own = [trigrams("one two three four five six")]
    assert is_near_duplicate("One, two: THREE four five (six)!", own, 1.0)
    assert is_near_duplicate("one two three four five six seven", own, 0.8)  # 4 of 5
    assert not is_near_duplicate("one two three four five six seven", own, 0.81)
    assert is_near_duplicate("Paris", [trigrams("paris!")], 1.0)
    assert not is_near_duplicate("Paris France", [trigrams("Paris")], 0.1)
    assert not is_near_duplicate("!!!", [trigrams("???")], 0.1)
    assert is_near_duplicate("x " * 3 + "a b c d e f g", [trigrams("a b c d e f g")], 5 / 8)


@given(
    lists=st.lists(st.lists(st.integers(0, 30), unique=True), min_size=1, max_size=3),
    bad=st.sets(st.integers(0, 30)),
    wanted=st.integers(0, 8),
)
def test_choosing_in_rounds_is_choosing_after_all_were_checked(lists, bad, wanted) -> None:
    asked: list[int] = []

    def copies(by_row):
        asked.extend(d for documents in by_row.values() for d in documents)
        return {row: documents & bad for row, documents in by_row.items()}

    chosen, met = select_negatives([lists], [wanted], copies)
    good = [[d for d in documents if d not in bad] for documents in lists]
    assert [c.document for c in chosen[0]] == [c.document for c in round_robin(good, wanted)]
    assert all(lists[c.teacher][c.place] == c.document for c in chosen[0])
    assert len(asked) == len(set(asked)), "a text was read twice"
    assert met == len(set(asked) & bad)


def test_near_duplicates_are_told_in_every_script() -> None:
    hindi = "मैं किताब पढ़ रहा हूँ"
    assert not is_near_duplicate("मैं कातिबु पढ़ रहा हूँ", [trigrams(hindi)], 0.5)
    assert is_near_duplicate("मैं किताब पढ़ रहा हूँ अभी", [trigrams(hindi)], 0.7)
    # Without spaces a changed end is not another text.
    assert is_near_duplicate(
        "今天天气很好我们去公园吗", [trigrams("今天天气很好我们去公园吧")], 0.7
    )
    assert is_near_duplicate("ภาษาไทยง่ายมากครับ", [trigrams("ภาษาไทยง่ายมากค่ะ")], 0.6)
    assert not is_near_duplicate("今天天气很好", [trigrams("我们去公园吧")], 0.1)
