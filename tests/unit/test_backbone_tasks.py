"""The tables of GLUE and XTREME-R, and what a run asks of them."""

import itertools
from statistics import fmean

import pytest

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed_papers.backbone.catalogue import FINETUNINGS, TASKS, plan_of, task_named
from rayembed_papers.backbone.settings import BackboneRun
from rayembed_papers.backbone.tables import printed, printed_models, printed_score
from rayembed_papers.backbone.xtreme_r import LEFT_OUT


def run(**settings) -> BackboneRun:
    return parse(BackboneRun, {"backbone": "somewhere", **settings})


def test_glue_is_the_grid_of_section_5_1():
    plan = plan_of(run(benchmarks=["glue"]))
    names = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"]
    assert [task.name for task in plan.tasks] == names
    for one in plan.finetunings:
        grid = (one.protocol.learning_rates, one.protocol.batch_sizes, one.protocol.seeds)
        assert grid == ((1e-5, 2e-5, 3e-5), (16, 32), (0, 1, 2, 3, 4))
        assert (one.protocol.epochs, one.protocol.max_length) == (3, 128)
        assert (one.protocol.warmup_share, one.protocol.max_grad_norm) == (0, 0)
    order = [one.name for one in plan.finetunings]
    assert {one.name for one in plan.finetunings if one.start == "MNLI"} == {"RTE", "STS-B", "MRPC"}
    assert all(order.index("MNLI") < order.index(name) for name in ("RTE", "STS-B", "MRPC"))


def test_what_a_task_starts_from_is_made_too_and_is_no_task_of_the_run():
    plan = plan_of(run(tasks=["RTE", "XCOPA"]))
    assert [task.name for task in plan.tasks] == ["RTE", "XCOPA"]
    assert [one.name for one in plan.finetunings] == ["MNLI", "RTE", "SIQa", "COPA"]
    plain = plan_of(run(tasks=["RTE"], from_mnli=False))
    assert [(one.name, one.start) for one in plain.finetunings] == [("RTE", None)]


def test_one_model_is_scored_on_all_its_tasks_that_were_asked_for():
    (squad,) = plan_of(run(tasks=["MLQA"])).finetunings
    assert squad.tasks == ("MLQA",)
    assert len(squad.scored) == 7
    (both,) = plan_of(run(tasks=["MLQA", "XQuAD"])).finetunings
    assert both.tasks == ("XQuAD", "MLQA")
    assert both.fingerprint != squad.fingerprint


def test_languages_of_xtreme_r():
    counts = {
        task.name: sum(s.task == task.name for s in FINETUNINGS[task.finetuning].scored)
        for task in TASKS.values()
        if task.benchmark == "xtreme-r"
    }
    assert counts == {
        **{"XNLI": 15, "XCOPA": 11, "UD-POS": 38, "WikiANN": 48, "XQuAD": 11, "MLQA": 7},
        **{"TyDiQA-GoldP": 9, "LAReQA": 11, "Tatoeba": 41},
    }


def test_every_task_has_rows_of_its_kind():
    widths = {"classes": (2, 3), "score": (3,), "choices": (5, 6), "tags": (2,), "spans": (3,)}
    for one in FINETUNINGS.values():
        for rows in one.all_rows:
            assert len(rows.columns) in widths.get(one.kind, (2,)), one.name
        assert bool(one.labels) == (one.kind in ("classes", "choices", "tags"))
        for task in one.tasks:
            assert task_named(task).finetuning == one.name
    places = [(r.repository, r.path) for one in FINETUNINGS.values() for r in one.all_rows]
    assert not [path for _, path in places if path.startswith("/") or ".py" in path]


def test_unknown_names_and_tasks_that_cannot_be_had():
    with pytest.raises(ConfigError, match="no task 'MRPA'; did you mean 'MRPC'"):
        plan_of(run(tasks=["MRPA"]))
    with pytest.raises(ConfigError, match="no benchmark 'gleu'; did you mean 'glue'"):
        plan_of(run(benchmarks=["gleu"]))
    with pytest.raises(ConfigError, match=r"'Mewsli-X' cannot be scored: .* no Parquet copy"):
        plan_of(run(tasks=["Mewsli-X"]))
    with pytest.raises(ConfigError, match="nothing to finetune on"):
        run()


def test_changes_of_the_protocol_reach_every_task_and_are_checked():
    changed = override(run(benchmarks=["glue"]), ["protocol.seeds=[7]", "protocol.epochs=1"])
    for one in plan_of(changed).finetunings:
        assert (one.protocol.seeds, one.protocol.epochs) == ((7,), 1)
        assert one.protocol.batch_sizes == (16, 32)
    wrong = override(run(tasks=["RTE"]), ["protocol.warmup_share=1.5"])
    with pytest.raises(ConfigError, match="warmup_share"):
        plan_of(wrong)
    twice = override(run(tasks=["RTE"]), ["protocol.seeds=[1, 1]"])
    with pytest.raises(ConfigError, match="contains a value twice"):
        plan_of(twice)
    with pytest.raises(ConfigError, match=r"no setting 'protocol.epoch'; did you mean 'epochs'"):
        override(run(tasks=["RTE"]), ["protocol.epoch=1"])


def test_the_grid_is_no_part_of_what_a_finetuning_is_called():
    plain = FINETUNINGS["RTE"]
    seeds = run(tasks=["RTE"], protocol={"seeds": [9], "learning_rates": [1e-3]})
    epochs = run(tasks=["RTE"], protocol={"epochs": 9})
    assert plan_of(seeds).finetunings[-1].fingerprint == plain.fingerprint
    assert plan_of(epochs).finetunings[-1].fingerprint != plain.fingerprint


def test_printed_tables_are_whole_and_have_the_printed_means():
    models = ("XLM-R-Base", "mNomic-BERT", "mGTE-Base")
    for benchmark, count in (("glue", 8), ("xtreme-r", 10)):
        assert printed_models(benchmark) == models
        for model in models:
            cells = {
                c.task: c.score for c in printed() if (c.model, c.benchmark) == (model, benchmark)
            }
            assert len(cells) == count + 1
            mean = fmean(score for task, score in cells.items() if task)
            # Half a last decimal of the mean; one row's is printed a little higher.
            assert cells[""] == pytest.approx(mean, abs=0.0065)
    ours = {task.name for task in TASKS.values()} | set(LEFT_OUT)
    assert {cell.task for cell in printed()} - {""} == ours
    assert printed_score("mNomic-BERT", "glue", "RTE") == 76.54


def test_mrpc_is_printed_as_accuracy():
    """Shares of its 408 rows; F1 has no such steps."""
    for model in ("mNomic-BERT", "mGTE-Base"):
        rows = printed_score(model, "glue", "MRPC") * 408 / 100
        assert abs(rows - round(rows)) < 0.03
    assert TASKS["MRPC"].metric == "accuracy"


def test_no_two_trials_share_a_place():
    grids = [
        (o.name, *v)
        for o in FINETUNINGS.values()
        for v in itertools.product(
            o.protocol.learning_rates, o.protocol.batch_sizes, o.protocol.seeds
        )
    ]
    assert len(grids) == len(set(grids)) == 8 * 30 + 8
