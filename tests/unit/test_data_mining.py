"""Mining against its definition, for every rule and whatever the number of parts."""

from functools import partial
from pathlib import Path

import mining_by_hand as by_hand
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import MiningConfig
from rayembed.config.settings import parse
from rayembed.data.mining.choose import choose, take_turns
from rayembed.data.mining.counts import histogram
from rayembed.data.mining.mine import make_mined
from rayembed.data.mining.near_duplicates import is_near_duplicate, trigrams
from rayembed.data.mining.rules import highest_scores
from rayembed.data.mining.tasks import MinePart
from rayembed.data.parts import read_records, write_part
from rayembed.data.prepared import Prepared, Workshop
from rayembed.data.records import Negative, Record
from rayembed.data.vectors.teacher import Teaching

RULES = [
    {"kind": "top_k"},
    {"kind": "top_k_perc_pos", "max_relative_score": 0.8},
    {"kind": "top_k_margin_pos", "margin": 1.0},
    {"kind": "top_k_abs", "max_score": 1.0},
]


def configured(**changes) -> MiningConfig:
    return parse(MiningConfig, {"teacher": "a", "num_negatives": 4, **changes})


def prepared(folder: Path, rows: list[Record], parts: int, name: str = "before") -> Prepared:
    """Rows as an earlier step left them, in so many parts."""
    made = [
        write_part(str(folder / name / "parts"), [rows[i] for i in places])
        for places in np.array_split(np.arange(len(rows)), parts)
    ]
    names = [[part.path.rsplit("/", 1)[-1], part.rows] for part in made]
    return Prepared(str(folder / name), {"fingerprint": f"{name} {parts}", "parts": names})


def workshop(folder: Path, seed: int = 0, **changes) -> Workshop:
    teaching = Teaching(by_hand.load, lambda reference: f"weights of {reference}")
    return Workshop(str(folder / "out"), seed, teaching=teaching, **changes)


def mine(folder: Path, rows, config: MiningConfig, parts: int = 1, **changes):
    """Mined records and the step's manifest."""
    dataset = dataset_of(config)
    before = prepared(folder, rows, parts)
    done = make_mined(workshop(folder, **changes), dataset, before)
    assert done.manifest["rows_in"] == done.manifest["rows_out"] == len(rows)
    return [r for part in done.parts for r in read_records(part.path)], done.manifest


def dataset_of(config: MiningConfig) -> DatasetConfig:
    source = {"kind": "pairs", "path": "none", "negatives": "negatives"}
    return parse(
        DatasetConfig, {"name": "d", "source": source, "mining": config.model_dump(mode="json")}
    )


def told(records) -> list:
    return [
        (
            [(n.text, n.rank, n.score, n.rule, n.teacher, n.cross_score) for n in r.negatives],
            r.positive_score,
        )
        for r in records
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["kind"])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    labels=st.booleans(),
    negatives=st.booleans(),
    near=st.sampled_from([None, 0.5, 0.8]),
    window=st.sampled_from([(0, 100), (0, 9), (5, 20)]),
)
def test_every_rule_equals_its_definition_with_1_2_and_3_parts(
    rule, seed, labels, negatives, near, window, tmp_path_factory
) -> None:
    rows = by_hand.made_up_rows(30, seed, labels=labels, given=negatives)
    config = configured(rule=rule, near_duplicate=near, skip=window[0], candidates=window[1])
    wanted = by_hand.mined(rows, config)
    for parts in (1, 2, 3):
        found, manifest = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert [r.id for r in found] == [r.id for r in rows]
        assert told(found) == wanted
        kept = [[n.text for n in r.negatives] for r in rows]
        assert manifest["mined"] == sum(len(n) for n, _ in wanted) - sum(map(len, kept))
        assert manifest["short"] == sum(len(n) < 4 for n, _ in wanted)
        assert manifest["without_negatives"] == sum(not n for n, _ in wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": {"kind": "top_k_perc_pos", "max_relative_score": 1.0}},
        {"rule": {"kind": "top_k"}},
        {"near_duplicate": None},
        {"near_duplicate": 0.99},
        {"skip": 5},
        {"candidates": 12},
        {"further_teachers": [{"teacher": "b"}]},
        {"teacher": "b"},
    ],
    ids=str,
)
def test_every_setting_changes_what_the_definition_gives(changes) -> None:
    """The control of the tests by definition: a step that ignored a setting would fail them."""
    rows = by_hand.made_up_rows(30, 1, labels=True)
    usual = {"near_duplicate": 0.5, "rule": RULES[1]}
    without = by_hand.mined(rows, configured(**usual))
    assert by_hand.mined(rows, configured(**(usual | changes))) != without


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), rule=st.sampled_from(RULES), count=st.sampled_from([3, 20]))
def test_teachers_take_turns(seed, rule, count, tmp_path_factory) -> None:
    rows = by_hand.made_up_rows(20, seed, labels=True)
    others = [{"teacher": "b"}, {"teacher": "c", "max_length": 7}]
    config = configured(further_teachers=others, rule=rule, num_negatives=count)
    wanted = by_hand.mined(rows, config)
    for parts in (1, 3):
        found, manifest = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert told(found) == wanted
    assert [one["weights"] for one in manifest["teachers"]] == [f"weights of {t}" for t in "abc"]
    assert len(manifest["histograms"]) == 3
    for record in found:
        texts = [n.text for n in record.negatives]
        assert len(set(texts)) == len(texts)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), rule=st.sampled_from(RULES), labels=st.booleans())
def test_given_negatives_are_filtered(seed, rule, labels, tmp_path_factory) -> None:
    rows = by_hand.made_up_rows(30, seed, labels=labels, given=True)
    config = configured(pool="given", rule=rule, num_negatives=2)
    wanted = by_hand.mined(rows, config)
    for parts in (1, 2, 3):
        found, manifest = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert told(found) == wanted
    assert manifest["candidates"] == sum(len(r.negatives) for r in rows)


def test_given_negatives_are_taken_from_no_one_else(tmp_path) -> None:
    rows = [
        Record("1", "q", ("p",), "d", (Negative("x"), Negative("y"))),
        Record("2", "r", ("s",), "d"),
    ]
    config = configured(pool="given", rule={"kind": "top_k"})
    found, manifest = mine(tmp_path, rows, config)
    assert sorted(n.text for n in found[0].negatives) == ["x", "y"]
    assert {n.rule for n in found[0].negatives} == {"top_k"}
    assert found[1].negatives == ()
    assert (manifest["short"], manifest["without_negatives"]) == (2, 1)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rule=st.sampled_from(
        [RULES[0], {"kind": "top_k_perc_pos"}, {"kind": "top_k_margin_pos"}, {"kind": "top_k_abs"}]
    ),
    pool=st.sampled_from(["corpus", "given"]),
    near=st.sampled_from([None, 0.5]),
)
def test_a_cross_encoder_decides(seed, rule, pool, near, tmp_path_factory) -> None:
    rows = by_hand.made_up_rows(20, seed, given=True)
    config = configured(
        rule=rule,
        pool=pool,
        near_duplicate=near,
        candidates=30,
        rescoring={"model": "reranker"},
        further_teachers=[{"teacher": "b"}],
    )
    wanted = by_hand.mined(rows, config)
    task = partial(MinePart, load_cross_encoder=by_hand.load_cross_encoder)
    for parts in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rayembed.data.mining.mine.MinePart", task)
            patch.setattr("rayembed.data.mining.rescoring._ROWS_AT_A_TIME", 7)
            found, _ = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert told(found) == wanted


def test_uniform_sampling_draws_from_all_that_the_rule_leaves(tmp_path) -> None:
    rows = by_hand.made_up_rows(40, 3, labels=True)
    config = configured(sampling="uniform", rule=RULES[1], num_negatives=2, near_duplicate=0.5)
    left = [[one[0] for one in kept] for kept, _ in by_hand.allowed(rows, config, "a")]
    seen: dict[int, list[tuple[str, ...]]] = {}
    for seed in range(8):
        found = [
            told(mine(tmp_path / f"{seed} {n}", rows, config, n, seed=seed)[0]) for n in (1, 3)
        ]
        assert found[0] == found[1], "other draws with other parts"
        for row, (negatives, _) in enumerate(found[0]):
            texts = tuple(text for text, *_ in negatives)
            assert set(texts) <= set(left[row])
            assert len(texts) == min(2, len(left[row]))
            seen.setdefault(row, []).append(texts)
    assert sum(len(set(draws)) > 4 for draws in seen.values()) > 30, "seeds draw alike"
    # Of 640 draws as many come from the better half of what is left as from the other.
    better = [
        left[row].index(text) < len(left[row]) / 2
        for row, draws in seen.items()
        for texts in draws
        for text in texts
    ]
    assert len(better) > 500
    assert 0.42 < np.mean(better) < 0.58  # four standard deviations


def test_a_seed_decides_nothing_where_nothing_is_drawn(tmp_path) -> None:
    rows = by_hand.made_up_rows(10, 0)
    first, _ = mine(tmp_path, rows, configured(), seed=0)
    again = make_mined(workshop(tmp_path, 1), dataset_of(configured()), prepared(tmp_path, rows, 1))
    assert len(list((tmp_path / "out/data/mined").iterdir())) == 1
    assert [r for part in again.parts for r in read_records(part.path)] == first


def test_a_second_run_does_nothing_and_another_teacher_of_the_name_mines_anew(tmp_path) -> None:
    rows = by_hand.made_up_rows(20, 0)
    before = prepared(tmp_path, rows, 2)
    done: list[str] = []

    def counting(weights: str, meaning: str) -> Workshop:
        def execute(task, units, needs):
            for unit in units:
                done.append(type(task.task).__name__)
                yield task(unit)

        def load(config, device):
            return lambda texts, role: by_hand.vectors_of(texts, meaning)

        teaching = Teaching(load, lambda reference: weights)
        return Workshop(str(tmp_path / "out"), 0, execute, teaching)

    first = make_mined(counting("old", "a"), dataset_of(configured()), before)
    assert sorted(set(done)) == ["EmbedPart", "MinePart"]
    done.clear()
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert make_mined(counting("old", "a"), dataset_of(configured()), before) == first
    assert not done
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == stamps
    other = make_mined(counting("new", "b"), dataset_of(configured()), before)
    assert sorted(done) == ["EmbedPart", "EmbedPart", "MinePart", "MinePart"]
    assert other.folder != first.folder
    negatives = {n.teacher for p in other.parts for r in read_records(p.path) for n in r.negatives}
    assert negatives == {"new"}
    # Another rule takes the vectors that are there.
    done.clear()
    make_mined(counting("old", "a"), dataset_of(configured(rule=RULES[0])), before)
    assert sorted(done) == ["EmbedPart", "EmbedPart", "MinePart", "MinePart"]


def test_vectors_that_are_there_are_not_made_again(tmp_path) -> None:
    rows = by_hand.made_up_rows(20, 0, given=True)
    calls: list[int] = []

    def load(config, device):
        calls.append(1)
        return by_hand.load(config, device)

    workshop_ = Workshop(str(tmp_path / "out"), 0, teaching=Teaching(load, lambda r: "w"))
    before = prepared(tmp_path, rows, 2)
    for changes, loaded in (({}, 2), ({"rule": RULES[0]}, 0), ({"pool": "given"}, 2)):
        calls.clear()
        make_mined(workshop_, dataset_of(configured(**changes)), before)
        assert len(calls) == loaded


def test_the_audit_counts_what_was_refused_and_chosen(tmp_path) -> None:
    rows = by_hand.made_up_rows(40, 5, labels=True)
    config = configured(rule=RULES[1], near_duplicate=0.5, candidates=30, skip=2)
    found, manifest = mine(tmp_path, rows, config, 3)
    one_part, manifest_of_one = mine(tmp_path / "one", rows, config, 1)
    assert one_part == found
    for name in ("refused", "histograms", "mining_examples", "candidates", "mined", "short"):
        assert manifest[name] == manifest_of_one[name], name
    assert manifest["candidates"] == 40 * 30
    assert manifest["refused"]["skipped rank"] == 40 * 2
    assert set(manifest["refused"]) >= {"a positive", "of the query's class", "by the rule"}
    histograms = manifest["histograms"][0]
    assert sum(histograms["positive"]) == 40
    assert sum(histograms["negative"]) == manifest["mined"]
    assert sum(histograms["refused_by_rule"]) == manifest["refused"]["by the rule"]
    assert len(manifest["mining_examples"]) == 20
    by_query = {r.query: r for r in found}
    for one in manifest["mining_examples"]:
        assert [n["text"] for n in one["negatives"]] in [
            [n.text for n in r.negatives] for r in found if r.query == one["query"]
        ]
        limit = by_hand.limit(config.rule, one["positive_score"])
        assert all(refused["score"] > limit for refused in one["refused"])
        assert one["query"] in by_query
    assert any(one["refused"] for one in manifest["mining_examples"])


def test_histograms_have_bins_of_two_hundredths() -> None:
    counts = histogram(np.array([-1.2, -1.0, -0.001, 0.0, 0.019, 0.03, 0.999, 1.0005]))
    assert len(counts) == 100
    assert {place: n for place, n in enumerate(counts) if n} == {0: 2, 49: 1, 50: 2, 51: 1, 99: 2}


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
    found = highest_scores(configured(rule=rule).rule, np.array([positive]))
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

    chosen, met = choose([lists], [wanted], copies)
    good = [[d for d in documents if d not in bad] for documents in lists]
    assert [c.document for c in chosen[0]] == [c.document for c in take_turns(good, wanted)]
    assert all(lists[c.teacher][c.place] == c.document for c in chosen[0])
    assert len(asked) == len(set(asked)), "a text was read twice"
    assert met == len(set(asked) & bad)
