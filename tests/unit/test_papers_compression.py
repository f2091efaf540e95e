"""Tables and verdicts of NV-Embed's Tables 6 to 8 from made-up scores."""

import pytest

from rayembed.display.tables import show
from rayembed_papers.compression import measure
from rayembed_papers.compression.job import NUM_CELLS, run_compression_tables
from rayembed_papers.compression.measure import BASE, METHODS, STRUCTURES, MeasuredCell
from rayembed_papers.compression.report import PRINTED, ordering_table, score_table
from rayembed_papers.compression.runs import base_run, compression_run, recovery_run


def made_up(seed, *, quantised=0.0):
    """Scores as the paper orders them, with a little of the seed."""
    found = {BASE: 0.5}
    for rank, method in enumerate(METHODS):
        for place, structure in enumerate(STRUCTURES):
            pruned = 0.2 + 0.02 * rank + 0.01 * place + 0.001 * seed * (rank + 1)
            found[MeasuredCell(method, structure)] = pruned
            found[MeasuredCell(method, structure, "labels")] = pruned + 0.1 + 0.002 * seed
            found[MeasuredCell(method, structure, "distilled")] = pruned + 0.15 + 0.001 * seed
    for structure in STRUCTURES:
        for kind in ("gptq", "fp8"):
            best = found[MeasuredCell("sparsegpt", structure, "distilled")]
            found[MeasuredCell(kind, structure)] = best + quantised + 0.0001 * seed
    return found


def rows_of(table):
    return {str(row[0]): [str(cell) for cell in row[1:]] for row in table.rows}


def test_a_seed_has_as_many_scores_as_the_job_counts():
    assert len(made_up(0)) == NUM_CELLS


def test_means_stand_beside_the_papers_figures():
    rows = rows_of(score_table({0: made_up(0), 1: made_up(1)}))
    assert rows["none"][0].startswith("0.5000")
    assert rows["sparsegpt, pruned"][0] == "0.2415 ± 0.0021 (68.48)"
    assert rows["magnitude, re-trained, distilled"][0].endswith("± 0.0014"), "not in the paper"
    assert rows["sparsegpt, distilled, INT8 by GPTQ"][2].endswith("(71.49)")
    assert "0.2415" in show(score_table({0: made_up(0), 1: made_up(1)}), "markdown")


def test_directions_hold_are_reversed_or_stay_open():
    seeds = {seed: made_up(seed) for seed in range(3)}
    verdicts = {name: cells[-1] for name, cells in rows_of(ordering_table(seeds)).items()}
    assert set(verdicts.values()) == {"holds"}
    turned = {
        seed: {
            MeasuredCell(
                {"sparsegpt": "wanda", "wanda": "sparsegpt"}.get(c.method, c.method),
                *(c.structure, c.recovery),
            ): score
            for c, score in scores.items()
        }
        for seed, scores in seeds.items()
    }
    turned_verdicts = {n: cells[-1] for n, cells in rows_of(ordering_table(turned)).items()}
    assert turned_verdicts["SparseGPT > Wanda, pruned"] == "reversed"
    noisy = {seed: made_up(seed, quantised=-0.08 + 0.04 * seed) for seed in range(3)}
    assert rows_of(ordering_table(noisy))["INT8 loses nothing"][-1] == "undecided"
    lossy = {seed: made_up(seed, quantised=-0.05) for seed in range(3)}
    assert rows_of(ordering_table(lossy))["FP8 loses nothing"][-1] == "reversed"
    one = rows_of(ordering_table({0: made_up(0)}))
    assert all(cells[-1] == "undecided: one seed" for cells in one.values())
    assert all(c[-1] == "not measured" for c in rows_of(ordering_table({0: {}})).values())


def test_noise_between_the_seeds_leaves_a_direction_undecided():
    seeds = {seed: made_up(seed) for seed in range(3)}
    for structure in STRUCTURES:
        seeds[1][MeasuredCell("sparsegpt", structure)] = 0.1
    assert rows_of(ordering_table(seeds))["SparseGPT > Wanda, pruned"][-1] == "undecided"


def test_the_papers_own_difference_stands_beside_each_direction():
    """Means over structures of its Tables 6 to 8; it distils models of SparseGPT alone."""
    rows = rows_of(ordering_table({0: made_up(0)}))
    assert {name: cells[0] for name, cells in rows.items()} == {
        "SparseGPT > Wanda, pruned": "+2.53",
        "Wanda > magnitude, pruned? (the paper: comparable)": "+0.31",
        "re-trained > pruned": "+2.34",
        "labels and distillation > labels, SparseGPT": "+0.46",
        "labels and distillation > labels, all methods": "",
        "INT8 loses nothing": "+0.01",
        "FP8 loses nothing": "-0.03",
    }


def test_distillation_of_sparsegpt_is_told_apart_from_that_of_all_methods():
    seed = made_up(0)
    for structure in STRUCTURES:
        seed[MeasuredCell("sparsegpt", structure, "distilled")] -= 0.1
    rows = rows_of(ordering_table({0: seed}))
    assert rows["labels and distillation > labels, SparseGPT"][1].startswith("-0.0500")
    assert rows["labels and distillation > labels, all methods"][1].startswith("+0.0167")


def test_the_papers_tables_are_whole():
    rows = [(method, recovery) for method in METHODS for recovery in ("", "labels")]
    rows += [("sparsegpt", "distilled"), ("gptq", ""), ("fp8", "")]
    cells = {
        MeasuredCell(method, structure, how) for method, how in rows for structure in STRUCTURES
    }
    assert PRINTED.keys() == cells


def test_a_recovery_keeps_zeros_and_learns_from_the_base(tmp_path):
    base = base_run(1, layers=2, steps=3, storage=str(tmp_path))
    labels = recovery_run(base, "pruned", "magnitude-2of4", steps=5, teacher=None)
    distilled = recovery_run(base, "pruned", "magnitude-2of4", steps=5, teacher="base")
    assert labels.model.keep_zeros
    assert distilled.model.keep_zeros
    assert not base.model.keep_zeros
    assert labels.model.backbone.num_layers is None, "the pruned model has its layers"
    assert base.model.backbone.num_layers == 2
    assert labels.stages[0] == base.stages[0].model_copy(update={"steps": 5})
    assert distilled.stages[0].loss == base.stages[0].loss, "the labels are learnt too"
    assert distilled.stages[0].hidden_states.teacher == "base"
    assert {labels.seed, distilled.seed}.isdisjoint({base.seed})
    assert labels.scores == base.scores


@pytest.mark.parametrize("seed", [0, 2])
def test_variants_are_scored_on_the_tasks_of_the_runs(seed, tmp_path):
    base = base_run(seed, layers=2, steps=3, storage=str(tmp_path))
    run = compression_run(base, "model", [{"kind": "magnitude", "structure": "2:4"}], "label")
    assert run.own_sets == base.scores.own_sets
    assert run.calibration.seed == seed
    assert run.speed is None
    assert run.placement.storage_path == str(tmp_path)


@pytest.fixture
def steps(monkeypatch):
    """Names of what `measure` does in its order, in place of trainings and compressions."""
    done = []

    def trained(run):
        done.append(run.name)
        return f"{run.name}/model", 0.01 * len(done)

    def compressed(base, model, ways, label):
        assert model.startswith(base.name) or model.startswith("pruned")
        done.append(f"{label} of {model}")
        return [(f"pruned-{label}", 0.01 * len(done)) for _ in ways]

    monkeypatch.setattr(measure, "_trained", trained)
    monkeypatch.setattr(measure, "_compressed", compressed)
    return done


def test_a_seed_is_measured_in_order_and_each_step_reads_the_one_before(steps, tmp_path):
    told = list(measure.measure(0, layers=1, steps=2, storage=str(tmp_path)))
    assert {cell for cell, *_ in told} == set(made_up(0))
    assert len(told) == NUM_CELLS
    base = base_run(0, layers=1, steps=2, storage=str(tmp_path)).name
    first = f"{METHODS[0]}-{STRUCTURES[0].replace(':', 'of')}"
    assert steps[:4] == [
        base,
        f"{first} of {base}/model",
        f"{base}-{first}-labels",
        f"{base}-{first}-distilled",
    ]
    quantised = [step for step in steps if "quantised" in step]
    assert len(quantised) == len(STRUCTURES)
    assert all("-distilled/model" in step for step in quantised), "the distilled are quantised"


def test_the_job_stops_at_its_time_and_the_same_command_goes_on(
    steps, tmp_path, monkeypatch, capsys
):
    clock = iter(range(0, 10**6, 30))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    storage = ["--storage-path", str(tmp_path)]
    assert run_compression_tables(["--seeds", "2", "--minutes", "5", *storage]) == 0
    some, out = len(steps), capsys.readouterr().out
    assert 1 < some < NUM_CELLS
    assert "goes on" in out
    table = tmp_path / "papers" / "nvembed-tables6-8.md"
    assert "| magnitude, pruned |" in table.read_text()
    steps.clear()
    assert run_compression_tables(["--seeds", "2", *storage]) == 0
    assert "goes on" not in capsys.readouterr().out
    assert len(steps) == 2 * (NUM_CELLS - len(STRUCTURES)), "two quantised models are one step"
    assert "±" in table.read_text()


@pytest.mark.slow
def test_one_structure_is_measured_in_earnest_and_read_the_second_time(tmp_path, monkeypatch):
    """Slow: three trainings of a layer of MiniLM and their scores, two minutes on two cores."""
    monkeypatch.setattr(measure, "METHODS", ("magnitude",))
    monkeypatch.setattr(measure, "STRUCTURES", ("2:4",))
    given = {"layers": 1, "steps": 2, "storage": str(tmp_path)}
    first = list(measure.measure(0, **given))
    assert [(c.method, c.structure, c.recovery) for c, *_ in first] == [
        ("none", "", ""),
        *(("magnitude", "2:4", recovery) for recovery in ("", "labels", "distilled")),
    ]
    assert first[1][1] < first[0][1], "half of the weights are gone"
    again = list(measure.measure(0, **given))
    assert [score for _, score, _ in again] == [score for _, score, _ in first]
    assert sum(took for *_, took in again) < sum(took for *_, took in first) / 3
