"""Paired bootstrap intervals: their width, what counts as noise, draws over tasks, clean parts."""

import numpy as np
import pytest
from scipy.stats import spearmanr, t
from sklearn.metrics import average_precision_score

from rayembed.results.intervals import PairedDifference, mean_difference, part_difference
from rayembed.results.items import ScoredPairs, as_text, average_precision, spearman


def spread(found):
    """Standard deviation that a 95 % interval of normal draws stands for."""
    low, high = found.interval
    return (high - low) / (2 * 1.96)


def tasks(count, queries, *, between, within, seed=0):
    """Differences of tasks whose true ones vary by `between`, with scores of queries."""
    generator = np.random.default_rng(seed)
    theirs = {f"t{i}": [generator.uniform(0, 1, queries)] for i in range(count)}
    ours = {
        task: [rows[0] + generator.normal(generator.normal(0, between), within, queries)]
        for task, rows in theirs.items()
    }
    return {task: ours[task][0].mean() - theirs[task][0].mean() for task in ours}, ours, theirs


def test_queries_give_the_standard_error_of_the_paired_differences():
    differences, ours, theirs = tasks(1, 400, between=0, within=0.2)
    found = mean_difference(differences, ours, theirs)
    # The bootstrap's own noise at 2,000 draws is 2 % of the width.
    apart = np.std(ours["t0"][0] - theirs["t0"][0]) / np.sqrt(400)
    assert spread(found) == pytest.approx(apart, rel=0.08)
    assert found == mean_difference(differences, ours, theirs), "draws are the same in every call"


def test_each_subset_counts_the_same_whatever_its_number_of_queries():
    generator = np.random.default_rng(1)
    few, many = generator.normal(0, 0.2, 50), generator.normal(0, 0.2, 5000)
    found = mean_difference({"t": 0.0}, {"t": [few, many]}, {"t": [few * 0, many * 0]})
    error = np.hypot(few.std() / np.sqrt(50), many.std() / np.sqrt(5000)) / 2
    assert spread(found) == pytest.approx(error, rel=0.08)


def test_tasks_are_drawn_only_where_asked_and_from_five_on():
    given = tasks(20, 100, between=0.1, within=0.2)
    alone, both = mean_difference(*given), mean_difference(*given, over_tasks=True)
    assert spread(alone) == pytest.approx(0.2 / np.sqrt(2000), rel=0.1)
    # Student's t of 19 degrees of freedom is 2.09, where the normal deviate is 1.96.
    of_tasks = np.std(list(given[0].values()), ddof=1) / np.sqrt(20) * 2.09 / 1.96
    assert spread(both) == pytest.approx(of_tasks, rel=0.1)
    four = tasks(4, 100, between=0.1, within=0.2)
    assert mean_difference(*four, over_tasks=True) == mean_difference(*four)


def test_noise_of_queries_counts_once_where_tasks_do_not_differ():
    wider = []
    for seed in range(12):
        given = tasks(20, 50, between=0.0, within=0.2, seed=seed)
        wider.append(spread(mean_difference(*given, over_tasks=True)) / 0.2 * np.sqrt(1000))
    # Resampled tasks on top of resampled queries would give the square root of 2.
    assert 0.95 < np.mean(wider) < 1.2


def test_tasks_alone_are_drawn_where_no_queries_have_scores():
    differences = {f"t{i}": 0.01 * i for i in range(9)}
    assert mean_difference(differences, {}, {}).interval is None
    found = mean_difference(differences, {}, {}, over_tasks=True)
    error = np.std(range(9), ddof=1) * 0.01 / 3
    assert spread(found) == pytest.approx(error * 2.31 / 1.96, rel=0.1), "t of 8 degrees"
    assert str(found).endswith(", tasks)")


def test_other_numbers_of_queries_are_not_paired():
    assert mean_difference({"t": 0.1}, {"t": [[1, 0]]}, {"t": [[1, 0, 1]]}).interval is None
    assert mean_difference({"t": 0.1}, {"t": [[1, 0]]}, {}).interval is None


def test_what_the_interval_does_not_tell_from_zero_is_printed_as_noise():
    noise = PairedDifference(0.005, (-0.01, 0.02))
    assert noise.is_noise
    assert str(noise) == "+0.005, within noise (95 %: -0.010 to +0.020)"
    assert noise.times(100).shown(2) == "+0.50, within noise (95 %: -1.00 to +2.00)"
    gain = PairedDifference(0.034, (0.021, 0.047))
    assert not gain.is_noise
    assert str(gain) == "+0.034 (95 %: +0.021 to +0.047)"
    assert not PairedDifference(-0.034, (-0.047, -0.021)).is_noise
    assert PairedDifference(0.0, (0.0, 0.0)).is_noise, "equal models"
    assert not PairedDifference(0.01).is_noise
    assert str(PairedDifference(0.01)) == "+0.010, no interval", "nothing is known of chance"


def test_a_part_is_compared_with_the_whole_that_it_belongs_to():
    generator = np.random.default_rng(2)
    scores = generator.uniform(0, 1, 1000)
    clean = generator.uniform(0, 1, 1000) < 0.8
    found = part_difference([scores], [clean])
    assert found.mean == pytest.approx(scores[clean].mean() - scores.mean())
    # The mean of a random 80 % differs from the whole's by s · sqrt((1/0.8 - 1) / n).
    assert spread(found) == pytest.approx(scores.std() * np.sqrt(0.25 / 1000), rel=0.1)
    assert found.is_noise
    better = scores + 0.1 * clean
    assert not part_difference([better], [clean]).is_noise
    everything = part_difference([scores, scores], [clean | True, clean | True])
    assert everything.interval == pytest.approx((0.0, 0.0), abs=1e-12)
    with pytest.raises(ValueError, match="a subset has none of the items"):
        part_difference([scores], [clean & False])


def test_scores_of_pairs_are_those_of_other_libraries():
    random = np.random.default_rng(0)
    for _ in range(20):
        similarities = random.integers(0, 12, 60) / 7  # many are equal
        grades, labels = random.integers(0, 6, 60), random.integers(0, 2, 60)
        times = random.integers(0, 3, 60)  # some are left out, some count twice
        for statistic, judged, reference in (
            (spearman, grades, lambda x, y: spearmanr(x, y)[0]),
            (average_precision, labels, lambda x, y: average_precision_score(y, x)),
        ):
            score = statistic(similarities, judged)
            wanted = reference(np.repeat(similarities, times), np.repeat(judged, times))
            assert score(times.astype(float)) == pytest.approx(wanted)
    assert np.isnan(spearman(np.ones(5), np.arange(5.0))(np.ones(5)))
    assert np.isnan(average_precision(np.arange(5.0), np.zeros(5))(np.ones(5)))


def pairs(generator, count, gain, statistic):
    """Two models with the same errors beside others of their own; `gain` makes the first better."""
    judged = generator.integers(0, 2, count) if statistic is average_precision else None
    judged = generator.random(count) if judged is None else judged
    both = generator.normal(0, 0.5, count)
    errors = generator.normal(0, 0.5, (2, count)) * np.array([[1 - gain], [1]])
    return [ScoredPairs(as_text(judged + both + one), as_text(judged), statistic) for one in errors]


@pytest.mark.parametrize("statistic", [spearman, average_precision])
def test_pairs_have_the_interval_of_a_bootstrap_over_them(statistic):
    mine, other = pairs(np.random.default_rng(3), 300, 0.0, statistic)
    every = np.ones(300)
    apart = mine.score(every) - other.score(every)
    found = mean_difference({"t": apart}, {"t": [mine]}, {"t": [other]})
    judged = np.array(mine.labels.split(), float)
    values = [np.array(one.similarities.split(), float) for one in (mine, other)]
    reference = {
        spearman: lambda x, y: spearmanr(x, y)[0],
        average_precision: lambda x, y: average_precision_score(y, x),
    }[statistic]
    generator = np.random.default_rng(9)
    draws = [
        reference(values[0][at], judged[at]) - reference(values[1][at], judged[at])
        for at in generator.integers(0, 300, (400, 300))
    ]
    # 400 draws know the width to some 4 %, on both sides.
    assert spread(found) == pytest.approx(np.std(draws), rel=0.15)
    assert found == mean_difference({"t": apart}, {"t": [mine]}, {"t": [other]})
    halves = mean_difference({"t": 0.0}, {"t": [mine, mine]}, {"t": [other, mine]})
    assert spread(halves) == pytest.approx(spread(found) / 2, rel=0.05), "subsets count the same"


def test_equal_models_on_pairs_differ_by_chance_alone():
    generator = np.random.default_rng(4)

    def is_noise(gain):
        mine, other = pairs(generator, 400, gain, spearman)
        return mean_difference({"t": 0.0}, {"t": [mine]}, {"t": [other]}).is_noise

    assert sum(is_noise(0.0) for _ in range(30)) >= 26, "of 95 %"
    assert sum(is_noise(0.9) for _ in range(10)) <= 1


def test_pairs_with_other_judgements_are_not_paired():
    mine, _ = pairs(np.random.default_rng(5), 50, 0.0, spearman)
    other = ScoredPairs(mine.similarities, mine.labels[::-1], spearman)
    assert mean_difference({"t": 0.1}, {"t": [mine]}, {"t": [other]}).interval is None
    assert mean_difference({"t": 0.1}, {"t": [mine]}, {"t": [[0.1] * 50]}).interval is None


def rare(number, positives, statistic=average_precision, seed=0):
    """Two models on pairs of which few are right."""
    generator = np.random.default_rng(seed)
    judged = np.arange(number) < positives
    return [
        ScoredPairs(as_text(judged + generator.normal(0, 1, number)), as_text(judged), statistic)
        for _ in range(2)
    ]


@pytest.mark.parametrize(("number", "positives"), [(200, 6), (400, 7), (30, 8)])
def test_draws_without_a_right_pair_take_no_interval_away(number, positives):
    mine, other = rare(number, positives)
    every = np.ones(number)
    apart = mine.score(every) - other.score(every)
    found = mean_difference({"t": apart}, {"t": [mine]}, {"t": [other]})
    assert -1 <= found.interval[0] < apart < found.interval[1] <= 1
    assert not found.drawn
    forty = {f"t{i}": [np.arange(30) / 30] for i in range(39)}
    both = {f"t{i}": 0.0 for i in range(39)} | {"t": apart}
    many = mean_difference(both, forty | {"t": [mine]}, forty | {"t": [other]})
    assert spread(many) == pytest.approx(spread(found) / 40, rel=0.1)


def test_a_task_whose_draws_mostly_have_no_score_takes_part_in_none():
    flat, other = (
        ScoredPairs(as_text(one), "1 " * 9 + "2", spearman) for one in ([1] * 10, range(10))
    )
    items = {"a": [np.arange(30) / 30]}
    found = mean_difference({"a": 0.0, "t": 0.2}, items | {"t": [flat]}, items | {"t": [other]})
    assert found.interval == pytest.approx((0.1, 0.1))
    assert found.drawn == ", items of 1 of 2 tasks"
    collapsed = mean_difference(
        {"a": 0.0, "t": np.nan}, items | {"t": [flat]}, items | {"t": [other]}
    )
    assert collapsed.interval is None


def test_too_few_items_are_never_a_certain_difference():
    for count in range(2, 6):
        found = mean_difference({"t": 1.0}, {"t": [[1.0] * count]}, {"t": [[0.0] * count]})
        assert found.is_noise, count
        assert str(found) == "+1.000, within noise (95 %: -1.000 to +1.000, too few items)"
    six = mean_difference({"t": 1.0}, {"t": [[1.0] * 6]}, {"t": [[0.0] * 6]})
    assert not six.is_noise, "the sign test has 3 % for six of six"
    subsets = mean_difference({"t": 1.0}, {"t": [[1.0] * 3] * 2}, {"t": [[0.0] * 3] * 2})
    assert subsets == six
    beside = mean_difference({"t": 1.0, "u": 0.5}, {"t": [[1.0] * 3]}, {"t": [[0.0] * 3]})
    assert beside.interval == pytest.approx((-0.25, 0.75)), "the other task stays as it is"
    mine, other = rare(60, 4)
    few = mean_difference({"t": 0.1}, {"t": [mine]}, {"t": [other]})
    assert few.interval == (-1.0, 1.0), "average precision is a mean over the right pairs"


def test_intervals_stay_within_what_scores_can_be():
    better = np.array([1.0, 1, 1, 1, 1, 0.2])
    found = mean_difference({"t": better.mean()}, {"t": [better]}, {"t": [better * 0]})
    assert found.interval[1] == 1.0
    apart = {f"t{i}": 2.0 * (i < 3) - 0.05 for i in range(5)}
    assert mean_difference(apart, {}, {}, over_tasks=True).interval[1] == 2.0


@pytest.mark.filterwarnings("error")
def test_a_part_of_few_items_has_no_interval():
    mine, _ = rare(40, 20)
    generator = np.random.default_rng(8)

    def clean(number, count=40):
        return generator.permutation(np.arange(count) < number)

    assert part_difference([mine], [np.arange(40) % 20 == 0]).interval is None
    scores = generator.random(40)
    assert part_difference([scores], [clean(5)]).interval is None
    assert part_difference([scores], [clean(6)]).interval is not None
    one_each = [clean(1) for _ in range(100)]
    assert part_difference([scores] * 100, one_each).is_noise
    whole = [clean(40)] * 99
    assert part_difference([mine] * 100, [*whole, clean(1)]).interval is None
    for number in (6, 8, 20):
        for items in (scores, mine, rare(40, 20, spearman)[0]):
            mask = np.concatenate([clean(number // 2, 20), clean(number // 2, 20)])
            interval = part_difference([items], [mask]).interval
            limit = 2 if getattr(items, "statistic", None) is spearman else 1
            assert interval is None or max(map(abs, interval)) <= limit
    many = part_difference([scores] * 100, [clean(3) for _ in range(100)])
    assert np.isfinite(many.interval).all()
    assert many.interval[0] < many.mean < many.interval[1]


def test_the_right_answers_of_a_few_seen_items_are_no_difference():
    """All of ten seen items are right by chance in 17 of 100 draws, where 84 of 100 are."""
    right = np.arange(50) % 50 >= 8
    clean = np.arange(50) < 40
    found = part_difference([right], [clean])
    assert found.mean == pytest.approx(32 / 40 - 42 / 50)
    assert found.is_noise
    easier = np.arange(100) >= 40
    assert not part_difference([easier], [np.arange(100) < 80]).is_noise, "20 of 20, 40 of 80"


def test_few_queries_have_the_width_of_students_interval():
    generator = np.random.default_rng(6)
    for count in (8, 20, 50):
        apart = generator.normal(0, 0.2, count)
        found = mean_difference({"t": apart.mean()}, {"t": [apart]}, {"t": [apart * 0]})
        wanted = t.ppf(0.975, count - 1) * apart.std(ddof=1) / np.sqrt(count)
        assert found.interval[1] - found.interval[0] == pytest.approx(2 * wanted, rel=0.12)
    assert mean_difference({"t": 0.1}, {"t": [[0.1]]}, {"t": [[0.0]]}).interval is None


def test_many_tasks_of_few_queries_are_widened_by_their_common_number():
    """Ten tasks of ten queries have some 90 degrees of freedom, not nine."""
    differences, ours, theirs = tasks(10, 10, between=0.0, within=0.2, seed=3)
    found = mean_difference(differences, ours, theirs)
    variances = [np.var(ours[t][0] - theirs[t][0], ddof=1) / 10 for t in differences]
    wanted = np.sqrt(np.sum(variances)) / 10
    assert spread(found) == pytest.approx(wanted * 2.0 / 1.96, rel=0.06)
