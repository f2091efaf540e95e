"""Records of trials and what is told of them: trial store, recorder, tables, importance."""

import csv
import io
import math
import statistics
from contextlib import suppress
from dataclasses import replace

import pytest
from garbling import damaged
from PIL import Image
from scipy.stats import ttest_rel
from tiny_job import make_run

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError
from rayembed_extras.sweeps.optuna_space import importance
from rayembed_extras.sweeps.plots import (
    difference_limits,
    differences_by_seed,
    importance_bars,
    parallel_coordinates,
    rows_with_spread,
)
from rayembed_extras.sweeps.recorder import TrialRecorder
from rayembed_extras.sweeps.results import (
    paper_table,
    reference_of,
    rows_of,
    rows_table,
    short_names,
    trials_csv,
    trials_table,
)
from rayembed_extras.sweeps.seeds import difference, spread
from rayembed_extras.sweeps.settings import RandomSearch, Sweep
from rayembed_extras.sweeps.trial_store import Report, TrialRecord, TrialStore, best

RATE = "stages.retrieval.optimizer.learning_rate"
RANK = "model.lora.rank"


def make_sweep(folder, space, runs=None) -> Sweep:
    run = make_run(folder).model_dump(mode="json")
    return parse(Sweep, {"name": "s", "runs": runs or {"": run}, "space": space})


def finished(key, score, values, label="", **tasks) -> TrialRecord:
    report = Report(4, score, {"score": score}, 1.0)
    return TrialRecord(
        key, label, values, state="finished", final=report, reports=[report], evaluation=tasks
    )


def event(kind, step, score, **changes):
    return {
        "kind": kind,
        "global_step": step,
        "score": score,
        "scores": {"t": score},
        "evaluation": {},
        "problem": "",
        **changes,
    }


def blank(key) -> TrialRecord:
    return TrialRecord(key, "", {RATE: "1"})


def test_what_is_written_is_read_back_and_a_broken_file_is_told(tmp_path):
    trial_store = TrialStore(str(tmp_path))
    assert trial_store.read() == {}
    record = finished("a", 0.5, {RATE: "0.1"}, t=0.25)
    running = TrialRecord("b", "x", {}, reports=[Report(2, 0.1, {"t": 0.1}, 3.0)])
    for one in (record, running):
        trial_store.write(one)
    assert trial_store.read() == {"a": record, "b": running}
    assert record.is_done
    assert not running.is_done
    assert running.score == 0.1
    path = tmp_path / "trials" / "a.json"
    whole = path.read_bytes()
    for place in range(40):
        path.write_bytes(damaged(whole, "flip", str(place)))
        with suppress(ArtifactError):
            assert trial_store.find("a") == record, "white space that changed"
    path.write_bytes(whole.replace(b"0.5", b"0.9"))
    with pytest.raises(ArtifactError, match="Remove it to have the trial run again"):
        trial_store.read()


def test_the_driver_notes_scores_ends_and_errors(tmp_path):
    trial_store = TrialStore(str(tmp_path))
    recorder = TrialRecorder(trial_store, {})
    recorder.record("1", blank("a"), event("score", 2, 0.3))
    recorder.record("1", blank("a"), event("score", 4, 0.4))
    assert recorder.num_ended == 0
    assert [r.global_step for r in trial_store.read()["a"].reports] == [2, 4]
    recorder.record_end("1", "a")
    assert trial_store.read()["a"].state == "stopped"
    assert recorder.num_ended == 1
    recorder.record("2", blank("b"), event("score", 2, 0.3))
    recorder.record("2", blank("b"), event("final", 6, 0.6, evaluation={"x": 1.0}))
    recorder.record_end("2", "b")
    assert trial_store.read()["b"].state == "finished"
    assert trial_store.read()["b"].evaluation == {"x": 1.0}
    recorder.record("3", blank("c"), event("problem", 0, math.nan, problem="DataError: no"))
    recorder.record_end("3", "c")
    assert (trial_store.read()["c"].state, trial_store.read()["c"].problem) == (
        "failed",
        "DataError: no",
    )
    recorder.record_failure("4", TrialRecord("d", "", {RATE: "0.5"}), "died")
    assert recorder.num_ended == 4
    assert trial_store.read()["d"].values == {RATE: "0.5"}
    assert best(trial_store.read()).key == "b"


def test_a_trial_that_goes_on_replaces_the_scores_that_it_tells_again(tmp_path):
    recorder = TrialRecorder(TrialStore(str(tmp_path)), {})
    for step, score in ((2, 0.3), (4, 0.4), (6, 0.5), (4, 0.45)):
        recorder.record("1", blank("a"), event("score", step, score))
    reports = recorder.records["a"].reports
    assert [(r.global_step, r.score) for r in reports] == [(2, 0.3), (4, 0.45)]


def test_seeds_of_a_row_give_mean_and_deviation(tmp_path):
    run = make_run(tmp_path).model_dump(mode="json")
    sweep = make_sweep(tmp_path, {"seed": ["0", "1", "2"]}, {"plain": run, "other": run})
    scores = {"plain": (0.2, 0.3, 0.7), "other": (0.5,)}
    records = {
        f"{label}{seed}": finished(f"{label}{seed}", score, {"seed": str(seed)}, label, t=score / 2)
        for label, values in scores.items()
        for seed, score in enumerate(values)
    }
    records["late"] = TrialRecord("late", "other", {"seed": "1"}, state="stopped")
    plain, other = rows_of(sweep, records)
    assert (plain.name, other.name) == ("plain", "other")
    spread = plain.scores["score"]
    assert spread.mean == pytest.approx(0.4)
    assert spread.deviation == pytest.approx(statistics.stdev((0.2, 0.3, 0.7)))
    assert other.scores["t"].mean == 0.25
    table = rows_table([plain, other], plain)
    assert "| plain | 3 | 40.00 ± 26.46 |  | 20.00 ± 13.23 |" in table
    assert "| other | 1 | 50.00 | +30.00 (1 of 1) | 25.00 |" in table
    printed = {"plain": {"Average": 61.5}, "absent": {"Average": 60.0}}
    beside = paper_table([plain, other], printed)
    assert "| plain | 3 | 40.00 ± 26.46 | 61.5 |" in beside
    assert "| absent |  | not measured | 60 |" in beside
    assert "| other | 1 | 50.00 |  |" in beside


def test_the_best_settings_have_the_best_mean_over_seeds_and_not_the_luckiest_seed():
    scores = {"0.1": (0.5, 0.9, 0.1), "0.2": (0.6, 0.7, 0.65), "0.3": (0.99,)}
    records = {
        f"{rate} {seed}": finished(f"{rate} {seed}", score, {RATE: rate, "seed": str(seed)})
        for rate, values in scores.items()
        for seed, score in enumerate(values)
    }
    assert best(records).key == "0.2 1"
    # Without repetitions every trial stands for itself.
    for values in ("0.1", "0.2"), ("0.1", "0.1"):
        alone = {
            key: replace(r, values={RATE: values[place % 2]})
            for place, (key, r) in enumerate(records.items())
        }
        alone["0.3 0"] = replace(alone["0.3 0"], values={RATE: "0.3"})
        assert best(alone).key == "0.3 0"
    assert best({}) is None
    assert best({"a": finished("a", math.nan, {RATE: "1"})}) is None


def test_a_score_that_is_no_number_is_left_out_of_a_row(tmp_path):
    sweep = make_sweep(tmp_path, {"seed": ["0", "1", "2"]})
    records = {
        str(seed): finished(str(seed), score, {"seed": str(seed)}, t=task)
        for seed, (score, task) in enumerate([(0.2, math.nan), (math.nan, 0.3), (0.4, math.nan)])
    }
    (row,) = rows_of(sweep, records)
    assert row.scores["score"].mean == pytest.approx(0.3)
    assert (row.scores["t"].mean, row.scores["t"].number) == (0.3, 1)
    assert "| 2 | 30.00 ± 14.14 |  | 30.00 |" in rows_table([row], row)


def test_rows_are_compared_seed_by_seed_with_the_first_or_the_best(tmp_path):
    scores = {"0.1": (0.5, 0.9, 0.1, 0.3), "0.2": (0.52, 0.92, 0.125), "0.3": (0.4, 0.95, 0.2)}
    records = {
        f"{rate} {seed}": finished(f"{rate} {seed}", score, {RATE: rate, "seed": str(seed)})
        for rate, values in scores.items()
        for seed, score in enumerate(values)
    }
    listed = make_sweep(tmp_path, {RATE: "grid(0.1, 0.2, 0.3)", "seed": "grid(0, 1, 2, 3)"})
    rows = rows_of(listed, records)
    first, near, far = rows
    assert reference_of(listed, rows) is first
    drawn = listed.model_copy(update={"search": RandomSearch()})
    assert reference_of(drawn, rows) is first, "the others have fewer seeds"
    three = [replace(row, records=row.records[:3]) for row in rows]
    assert reference_of(drawn, three) is three[1]
    few = [three[0], replace(far, records=far.records[1:2]), three[2]]
    assert reference_of(listed, few[1:]) is few[2]
    again = finished("again", 0.7, {RATE: "0.1", "seed": "0"})
    twice = replace(first, records=(*first.records, again))
    assert twice.by_seed["0"] == pytest.approx(0.6), "two trials of a seed count as their mean"
    assert reference_of(listed, [replace(row, records=()) for row in rows]) is None
    for row in (near, far):
        label = row.values[RATE]
        found = row.apart(first)
        by_scipy = ttest_rel(scores[label], scores["0.1"][:3])
        low, high = by_scipy.confidence_interval(0.95)
        assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
        expected = "holds" if low > 0 else "reversed" if high < 0 else "undecided"
        assert found.verdict() == expected
    # The spread of the seeds is ten times that of the differences, which decide.
    assert near.apart(first).verdict() == "holds"
    assert near.apart(first).verdict(0.02) == "undecided"
    assert far.apart(first).verdict() == "undecided"
    assert first.apart(near).verdict() == "reversed"
    assert near.apart(replace(first, records=())) is None
    table = rows_table(rows, first)
    assert "| optimizer.learning_rate=0.1 | 4 | 45.00 ± 34.16 |  |" in table
    assert "| +2.17 ± 0.72 (3 of 3) |" in table
    differences_by_seed(rows, first, tmp_path / "d.png")
    differences_by_seed([first], first, tmp_path / "none.png")
    for name in ("d", "none"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_tables_have_every_trial_with_its_values(tmp_path):
    sweep = make_sweep(tmp_path, {RATE: "grid(0.1, 0.2)", RANK: "grid(2, 4)"})
    records = {
        "a": finished("a", 0.5, {RATE: "0.1", RANK: "2"}, t=0.1),
        "b": finished("b", 0.7, {RATE: "0.2", RANK: "2"}, t=0.2),
        "c": TrialRecord("c", "", {RATE: "0.1", RANK: "4"}, state="failed", problem="no | room"),
    }
    lines = trials_table(sweep, records).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| b", "| a", "| c"]
    assert lines[2] == "| b | 0.2 | 2 | finished | 4 | 0.7000 |"
    assert "no / room" in lines[4]
    rows = list(csv.DictReader(io.StringIO(trials_csv(sweep, records))))
    assert rows[1][RATE] == "0.2"
    assert rows[1]["t"] == "0.2"
    assert rows[2]["state"] == "failed"


def test_importance_finds_the_setting_that_decides(tmp_path):
    sweep = make_sweep(
        tmp_path,
        {
            RATE: "loguniform(1e-4, 1e-1)",
            RANK: "integers(1, 9)",
            "model.mask": "choice(causal, bidirectional)",
        },
    ).model_copy()
    records = {}
    for number in range(40):
        rate = 10 ** (-4 + 3 * ((number * 7) % 40) / 39)
        mask = ("causal", "bidirectional")[number % 2]
        values = {RATE: repr(rate), RANK: str(1 + number % 9), "model.mask": mask}
        records[str(number)] = finished(str(number), math.log10(rate) / 10 + 1, values)
    shares = importance(sweep, records)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[RATE] > 0.8
    few = {key: records[key] for key in ("0", "1", "2")}
    assert importance(sweep, few) == {}
    same = {key: finished(key, 0.5, record.values) for key, record in records.items()}
    assert importance(sweep, same) == {}


def test_pictures_are_drawn_with_ended_trials_and_single_points(tmp_path):
    sweep = make_sweep(
        tmp_path, {RATE: "loguniform(1e-4, 1e-1)", "model.mask": "grid(causal, bidirectional)"}
    )
    records = {
        "a": finished("a", 0.5, {RATE: "0.001", "model.mask": "causal"}),
        "b": TrialRecord(
            "b",
            "",
            {RATE: "0.1", "model.mask": "causal"},
            state="stopped",
            reports=[Report(2, 0.1, {}, 1.0)],
        ),
        "c": TrialRecord("c", "", {RATE: "0.01", "model.mask": "causal"}, state="failed"),
    }
    parallel_coordinates(sweep, records, tmp_path / "p.png")
    importance_bars({RATE: 0.9, "model.mask": 0.1}, tmp_path / "i.png")
    rows_with_spread(rows_of(sweep, records), tmp_path / "r.png")
    parallel_coordinates(sweep, {}, tmp_path / "empty.png")
    for name in ("p", "i", "r", "empty"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_settings_whose_paths_end_alike_have_names_of_their_own(tmp_path):
    second = "stages.blend.optimizer.learning_rate"
    values = {RATE: "0.1", second: "0.2", RANK: "2"}
    sweep = make_sweep(tmp_path, {path: f"grid({value})" for path, value in values.items()})
    records = {"a": finished("a", 0.5, values)}
    names = ["retrieval.optimizer.learning_rate", "blend.optimizer.learning_rate", "lora.rank"]
    assert list(short_names(sweep.domains).values()) == names
    (row,) = rows_of(sweep, records)
    assert row.name == f"{names[0]}=0.1, {names[1]}=0.2, {names[2]}=2"
    assert f"| {' | '.join(names)} |" in trials_table(sweep, records)
    assert short_names(["a.b", "x.a.b", "seed"]) == {"a.b": "a.b", "x.a.b": "x.a.b", "seed": "seed"}


def test_names_of_rows_have_few_digits_and_pictures_have_room_for_each_row(tmp_path):
    rates = [f"{1.2345678e-5 * (number + 1)!r}" for number in range(30)]
    sweep = make_sweep(tmp_path, {RATE: "loguniform(1e-6, 1e-1)"})
    records = {r: finished(r, 0.01 * place, {RATE: r}) for place, r in enumerate(rates)}
    rows = rows_of(sweep, records)
    assert max(len(row.name) for row in rows) <= len("optimizer.learning_rate=0.0001235")
    for number in (3, 30):
        rows_with_spread(rows[:number], tmp_path / f"rows{number}.png")
        shares = {f"stages.a.setting{place}": 1 / number for place in range(number)}
        importance_bars(shares, tmp_path / f"importance{number}.png")
    for kind in ("rows", "importance"):
        few, many = (Image.open(tmp_path / f"{kind}{number}.png").height for number in (3, 30))
        assert few / 3 < 200, "three rows do not fill a page"
        assert many - few == pytest.approx(27 * 0.34 * 160, abs=2)
    long = "a, ".join(f"settings.with.long.names.number{place}=1" for place in range(9))
    names = {f"{long}{place}": 0.5 for place in range(3)}
    importance_bars(names, tmp_path / "long.png")
    assert Image.open(tmp_path / "long.png").width < 12 * 160


def test_intervals_of_two_seeds_do_not_stretch_the_axis_of_the_others():
    three = (difference([0.01, 0.02, 0.03]), [1.0, 2.0, 3.0])
    two = (difference([0.01, 0.05]), [1.0, 5.0])
    assert 100 * two[0].half > 20
    low, high = difference_limits([three, two])
    half = 100 * three[0].half
    assert low <= 2.0 - half < low + 1
    assert high - 1 < 5.0 <= high
    alone = difference_limits([two])
    assert alone[0] < 3.0 - 100 * two[0].half
    assert difference_limits([])[0] < 0.0 < difference_limits([])[1]


def test_a_spread_is_of_a_sample_and_a_single_number_stands_alone():
    found = spread((0.5, 0.7))
    assert (found.text(), found.number) == ("0.600 ± 0.141", 2)
    assert found.text(digits=2, times=100) == "60.00 ± 14.14"
    assert spread((0.25,)).text(signed=True) == "+0.250"
