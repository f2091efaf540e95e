"""Models beside each other: differences, tables, plots."""

import csv
import io
import json
import re

import numpy as np
import pytest
from made_results import write_benchmark, write_result
from rich.console import Console

from rayembed.errors import ConfigError
from rayembed.results.costs import Cost
from rayembed_extras.comparison.benchmark_lines import MEAN, Line, benchmark_lines
from rayembed_extras.comparison.compare import Column, ModelComparison, compare, measured
from rayembed_extras.comparison.plots import category_bars, difference_dots
from rayembed_extras.comparison.results import read_model, stored_models
from rayembed_extras.comparison.tables import (
    MODELS_A_TABLE,
    category_table,
    comparison_csv,
    comparison_markdown,
    difference_table,
    task_tables,
)
from rayembed_papers.published.columns import published

MTEB = "MTEB(eng, v1)"

LINES = (
    Line("FiQA2018", "Retrieval", "ndcg_at_10", "FiQA2018"),
    Line("SciFact", "Retrieval", "ndcg_at_10", "SciFact"),
    Line("STS12", "STS", "cosine_spearman", "STS12"),
)
OURS = Column(
    "ours",
    published=False,
    scores={"FiQA2018": 50.0, "SciFact": 80.0, "STS12": 70.0},
    averages={"Retrieval": 65.0, "STS": 70.0, MEAN: 66.667},
    name="org/ours",
)
PART = Column("part", False, {"FiQA2018": 55.004, "STS12": 60.0}, {"STS": 60.0}, name="org/part")
THEIRS = Column(
    "Theirs",
    published=True,
    scores={"FiQA2018": 55.0, "STS12": 71.5},
    averages={"Retrieval": 66.0, "STS": 71.5},
    name="theirs",
    notes=("Theirs: as printed.",),
)
COMPARISON = ModelComparison("Small", LINES, (OURS, PART, THEIRS), "Theirs")


def shown(*tables, width=120, colours=False):
    text = io.StringIO()
    console = Console(
        file=text, width=width, force_terminal=colours, color_system="standard" if colours else None
    )
    for table in tables:
        console.print(table)
    return text.getvalue()


def cells(text, label):
    """The cells of the line that begins with `label`, and of the line below it."""
    lines = [*text.splitlines(), ""]
    (number,) = [i for i, line in enumerate(lines) if line.startswith(label)]
    return lines[number].removeprefix(label).split("  "), lines[number + 1].split()


def test_differences_are_ours_less_theirs_in_points():
    assert COMPARISON.difference(OURS, "FiQA2018") == -5.0
    assert COMPARISON.difference(OURS, "Retrieval") == -1.0
    assert COMPARISON.difference(OURS, "SciFact") is None, "they have no such figure"
    assert COMPARISON.difference(THEIRS, "FiQA2018") is None, "the baseline itself"
    assert [line.name for line in COMPARISON.missing(PART)] == ["SciFact"]


def test_the_table_by_category_counts_what_is_missing():
    text = shown(category_table(COMPARISON))
    first, second = cells(text, "ours")
    assert [cell.strip() for cell in first if cell.strip()] == ["65.00", "70.00", "66.67"]
    assert second == ["-1.00", "-1.50"]
    first, second = cells(text, "part")
    assert [cell.strip() for cell in first if cell.strip()] == ["1 of 2", "60.00", "2 of 3"]
    first, _ = cells(text, "Theirs [paper, baseline]")
    assert [cell.strip() for cell in first if cell.strip()] == ["66.00", "71.50", "–"]


def test_the_best_as_printed_are_bold():
    text = shown(*task_tables(COMPARISON), colours=True)
    assert "\x1b[1m55.00\x1b[0m" in text
    assert text.count("\x1b[1m55.00") == 2, "55.004 and 55 print alike"
    assert "\x1b[1m50.00" not in text


def test_markdown_has_both_tables_and_the_notes():
    text = comparison_markdown(COMPARISON).splitlines()
    assert "| Model | Retrieval (2) | STS (1) | Mean (3) |" in text
    assert "| ours | 65.00 (-1.00) | 70.00 (-1.50) | **66.67** |" in text
    assert "| part | 1 of 2 | 60.00 (-11.50) | 2 of 3 |" in text
    assert "| SciFact | nDCG@10 | **80.00** | – | – |" in text
    assert "- Theirs: as printed." in text


def test_csv_has_every_score_once_with_its_difference():
    rows = list(csv.DictReader(io.StringIO(comparison_csv(COMPARISON))))
    assert len(rows) == (3 + 3) + (2 + 1) + (2 + 2)
    keyed = {(row["model"], row["level"], row["category"], row["task"]): row for row in rows}
    assert len(keyed) == len(rows)
    row = keyed["part", "task", "Retrieval", "FiQA2018"]
    assert (float(row["score"]), float(row["difference"])) == (55.004, pytest.approx(0.004))
    assert (row["metric"], row["published"], row["baseline"]) == ("nDCG@10", "false", "Theirs")
    assert keyed["ours", "benchmark", MEAN, ""]["difference"] == ""


def test_tables_of_the_terminal_fit_120_columns(tmp_path):
    lines = benchmark_lines(MTEB)
    names = [f"a-rather-long-name-of-a-model-{i}" for i in range(5)]
    for name in names:
        write_benchmark(tmp_path, f"org/{name}", "r", lines, lambda task: len(task) / 100)
    columns = [
        measured(model, read_model(model), MTEB, lines, label=model.name.removeprefix("org/"))
        for model in stored_models([tmp_path])
    ]
    columns += [published(name, MTEB, lines) for name in ("nvembed-v2", "gte-qwen2-7b")]
    comparison = compare(MTEB, lines, columns, None)
    tables = task_tables(comparison)
    # The baseline stands in each.
    assert len(tables) == -(-(len(columns) - 1) // (MODELS_A_TABLE - 1)) == 2
    text = shown(category_table(comparison), *tables, width=120)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 120
    for line in lines:
        assert len(re.findall(rf"^ {re.escape(line.name)} ", text, re.MULTILINE)) == 2
    wide = shown(category_table(comparison), *tables, width=400)
    assert wide.count("72.31") == text.count("72.31") == 1, "nothing is cut off"


def test_what_is_not_there_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no benchmark 'BEIRR'; did you mean 'BEIR'"):
        benchmark_lines("BEIRR")
    with pytest.raises(ConfigError, match="is not among the compared models; did you mean 'ours'"):
        compare("Small", LINES, [OURS, THEIRS], "our")


def test_the_baseline_is_the_first_paper_unless_another_is_named():
    columns = [OURS, PART, THEIRS]
    assert compare("Small", LINES, columns, None).baseline == "Theirs"
    assert compare("Small", LINES, columns, "org/part").baseline == "part"
    assert compare("Small", LINES, columns, "theirs").baseline == "Theirs"
    assert compare("Small", LINES, [OURS, PART], None).baseline == "ours"
    assert compare("Small", LINES, [OURS], None).baseline is None


def test_scores_of_other_data_and_begun_ones_are_noted(tmp_path):
    lines = [line for line in benchmark_lines("BEIR") if line.task in ("SciFact", "NFCorpus")]
    write_result(
        tmp_path, "o/m", "r", "SciFact", {("test", "default"): 0.5}, dataset_revision="theirs"
    )
    write_result(tmp_path, "o/m", "r", "NFCorpus", {("dev", "default"): 0.5})
    (model,) = stored_models([tmp_path])
    column = measured(model, read_model(model), "BEIR", lines, label="m")
    assert column.scores == {"SciFact": 50.0}
    assert column.notes == (
        "m: scored on other revisions of the data than mteb's: SciFact.",
        "m: begun, not complete: NFCorpus; NFCorpus lacks test/default.",
    )
    assert column.origins["SciFact"].dataset_revisions == ("theirs",)
    write_benchmark(tmp_path, "o/m", "r", lines, 0.25)
    clean = measured(model, read_model(*stored_models([tmp_path])), "BEIR", lines, label="m")
    assert (clean.notes, clean.averages) == ((), {MEAN: 25.0})


def two_of_an_own_set(folder, revisions, conditions):
    """Columns `a` and `b` on the same own set and on SciFact, as evaluations leave them."""
    lines = (Line("own", "Retrieval", "ndcg_at_10", "own", (("test", "default"),)),)
    lines += tuple(line for line in benchmark_lines("BEIR") if line.task == "SciFact")
    for name, revision, taken in zip("ab", revisions, conditions, strict=True):
        for line in lines:
            made = {} if line.task == "SciFact" else {"dataset_revision": revision}
            scores = {("test", "default"): 0.4 if name == "a" else 0.6}
            path = write_result(folder, f"o/{name}", "r", line.task, scores, **made)
        facts = {"type": "Retrieval", "metric": "ndcg_at_10", "dataset": "own/own"}
        rows = [
            {"task": line.task, "side": "query", "prompt": taken["prompt"], **facts}
            for line in lines
        ]
        shared = {key: value for key, value in taken.items() if key != "prompt"}
        told = {"conditions": shared, "prompts": rows}
        (path.parent / "prompts.yaml").write_text(json.dumps(told))
    columns = [
        measured(model, read_model(model), "All", lines, label=model.name[-1])
        for model in stored_models([folder])
    ]
    return compare("All", lines, columns, "a")


def test_scores_of_other_content_have_no_difference(tmp_path):
    same = {"dtype": "float32", "prompt": ""}
    alike = two_of_an_own_set(tmp_path / "alike", ("1", "1"), (same, same))
    b = alike.columns[1]
    assert alike.difference(b, "own") == pytest.approx(20.0)
    assert alike.difference(b, MEAN) == pytest.approx(20.0)
    assert alike.notes == ()

    other = two_of_an_own_set(tmp_path / "other", ("1", "2"), (same, same))
    b = other.columns[1]
    assert other.difference(b, "own") is None
    assert other.difference(b, MEAN) is None, "one of its tasks is of other content"
    assert other.difference(b, "SciFact") == pytest.approx(20.0)
    assert other.notes == (
        "b: scored on other data than a, so no difference is shown: own. Score both on the same "
        "data to compare them.",
    )
    text = comparison_markdown(other)
    assert "| own | nDCG@10 | 40.00 | **60.00** |" in text
    assert other.notes[0] in text
    rows = {
        (row["model"], row["task"]): row
        for row in csv.DictReader(comparison_csv(other).split("\n"))
    }
    assert rows["b", "own"]["difference"] == ""


def test_scores_that_were_taken_otherwise_are_noted(tmp_path):
    here = {"dtype": "float32", "software": "1", "max_length": "512", "prompt": "query: "}
    there = {"dtype": "bfloat16", "software": "2", "max_length": "512", "prompt": ""}
    found = two_of_an_own_set(tmp_path, ("1", "1"), (here, there))
    assert found.difference(found.columns[1], "own") == pytest.approx(20.0)
    assert found.notes == (
        "b: scored in another way than a: dtype 'bfloat16', there 'float32' (2 tasks); prompts '', "
        "there 'query: ' (2 tasks); software '2', there '1' (2 tasks).",
    )


def size(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_plots_are_drawn_and_grow_with_what_they_show():
    lines = benchmark_lines(MTEB)
    columns = [published(name, MTEB, lines) for name in ("nvembed-v2", "nvembed-v1")]
    large = compare(MTEB, lines, columns, None)
    assert size(category_bars(large))[0] > size(category_bars(COMPARISON))[0]
    assert size(difference_dots(large))[1] > 3 * size(difference_dots(COMPARISON))[1] / 2
    assert difference_dots(ModelComparison("Small", LINES, (OURS,), None)) is None
    apart = Column("apart", True, {}, {"Classification": 3.0})
    assert difference_dots(ModelComparison("Small", LINES, (OURS, apart), "apart")) is None


def test_bars_stand_for_the_averages_and_dots_for_the_differences(monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    category_bars(COMPARISON)
    difference_dots(COMPARISON)
    bars, dots = (figure.axes[0] for figure in drawn)
    heights = {c.get_label(): [bar.get_height() for bar in c] for c in bars.containers}
    assert heights == {"ours": [65.0, 70.0, 66.667], "part": [60.0], "Theirs (paper)": [66.0, 71.5]}
    labels = [tick.get_text() for tick in dots.get_yticklabels()]
    assert labels == ["Retrieval (2)", "FiQA2018", "STS: STS12"], "no model shares the others"
    marks = [[tuple(map(float, xy)) for xy in c.get_offsets()] for c in dots.collections]
    assert [(-5.0, 1.0)] in marks
    assert [(-1.0, 0.0), (-1.5, 2.0)] in marks


def with_queries(label, shift, noise, seed=0, cost=None):
    """A model on eight retrievals of 50 queries, better than 0.5 by `shift` and by chance."""
    generator = np.random.default_rng(seed)
    queries = {f"T{i}": [generator.normal(0.5 + shift, noise, 50)] for i in range(8)}
    scores = {name: 100 * parts[0].mean() for name, parts in queries.items()}
    means = {MEAN: sum(scores.values()) / 8}
    return Column(label, False, scores, means, name=label, items=queries, cost=cost or Cost())


EIGHT = tuple(Line(f"T{i}", "Retrieval", "ndcg_at_10", f"T{i}") for i in range(8))


def test_differences_within_noise_are_named_so_everywhere():
    base, chance = with_queries("base", 0, 0.1), with_queries("chance", 0, 0.1, seed=1)
    better = with_queries("better", 0.1, 0.1, seed=2)
    comparison = ModelComparison("Eight", EIGHT, (base, chance, better), "base")
    noise, real = (comparison.paired(column, MEAN) for column in (chance, better))
    assert noise.is_noise
    assert not real.is_noise
    assert real.mean == pytest.approx(comparison.difference(better, MEAN))
    low, high = real.interval
    # In points; the standard error of 400 pairs of queries is 0.7.
    assert high - low == pytest.approx(2 * 1.96 * 100 * 0.1 * 2**0.5 / 20, rel=0.35)
    text = comparison_markdown(comparison)
    assert f"({noise.mean:+.2f}, within noise)" in text
    assert f"({real.mean:+.2f})" in text
    assert f"| chance | Mean | {noise.mean:+.2f}, within noise (95 %: " in text
    assert f"| better | Mean | {real.mean:+.2f} (95 %: {low:+.2f} to {high:+.2f}) |" in text
    assert comparison.paired(better, "T0").interval != real.interval
    printed = shown(category_table(comparison), difference_table(comparison, tasks=False))
    assert f"≈{noise.mean:+.2f}" in printed
    assert "within noise, as the 95 % interval" in " ".join(printed.split())
    assert "T0" not in printed
    rows = list(csv.DictReader(io.StringIO(comparison_csv(comparison))))
    (row,) = [r for r in rows if r["model"] == "better" and r["level"] == "benchmark"]
    assert (float(row["low"]), float(row["high"])) == (low, high)


def test_without_scores_of_queries_nothing_is_called_noise():
    assert difference_table(COMPARISON) is None
    assert comparison_markdown(COMPARISON).count("noise") == 0


def test_costs_stand_beside_the_scores_where_any_model_has_them():
    priced = Cost(1000, 10.0, 1536, 3.6)
    models = with_queries("base", 0, 0.1, cost=priced), with_queries("plain", 0, 0.1, seed=1)
    text = comparison_markdown(ModelComparison("Eight", EIGHT, models, "base"))
    assert "| Documents/s | Bytes/document | Price of 1M |" in text
    assert "| 100 | 1,536 | 10.00 |" in text
    assert "| – | – | – |" in text
    assert "Documents/s" not in comparison_markdown(COMPARISON)
