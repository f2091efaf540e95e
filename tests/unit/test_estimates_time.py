"""How long a run on CPUs will take, told before it starts."""

import re

import pytest
import torch

from rayembed.config.override import override
from rayembed.machine import gpu_check
from rayembed.machine.gpu_check import GpuFacts
from rayembed.machine.hardware import Precision
from rayembed.pipeline.run.dry_run import step_load
from rayembed.recipes.catalogue import get_recipe
from rayembed_extras.estimates import time as module
from rayembed_extras.estimates.time import estimate, estimate_trials, gpu_hours


@pytest.fixture
def milan(monkeypatch):
    """Two cores of the machine on which the quickstart took 11 minutes."""
    float32 = Precision("float32", "this CPU emulates bfloat16 (30 times slower)")
    monkeypatch.setattr(module, "expected_precision", lambda run: float32)
    monkeypatch.setattr(module, "product_speed", lambda dtype: 70e9)
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    monkeypatch.setattr(module, "cpu_summary", lambda: "2 cores (AMD EPYC)")


def test_the_quickstart_is_told_about_what_it_took(milan):
    expected = estimate(get_recipe("nvembed-quickstart"))
    assert 9 < expected.seconds / 60 < 14
    assert str(expected).startswith(
        "2 cores (AMD EPYC), 140 GFLOP/s in float32: this CPU emulates bfloat16 (30 times slower): "
        "about 1"
    )


def test_more_work_takes_longer(milan):
    run, sentences = get_recipe("nvembed-quickstart"), "WikiSentenceRetrieval"
    changes = (
        "stages.retrieval.steps=72",
        "model.backbone.num_layers=16",
        "placement.grad_cache=true",
        f"evaluation.own_sets.{sentences}.path=sample://wikipedia/{sentences}?documents=1000",
    )
    base = estimate(run).seconds
    assert all(estimate(override(run, [change])).seconds > base + 20 for change in changes)


def test_held_out_parts_are_scored_for_each_model(milan):
    run = get_recipe("biencoder")
    unscored = override(run, ["data.datasets.pairs.held_out=null", "evaluation.guard=null"])
    plain = override(run, ["evaluation.guard=null"])
    twice = estimate(plain).seconds - estimate(unscored).seconds
    assert twice > 10
    five = estimate(run).seconds - estimate(unscored).seconds
    assert five == pytest.approx(2.5 * twice)


def test_scores_while_training_are_counted_as_often_as_they_are_taken(milan):
    run = override(get_recipe("biencoder"), ["evaluation.guard=null"])

    def seconds(every):
        held_out = f"evaluation.validation={{data: {{kind: held_out}}, every_steps: {every}}}"
        return estimate(override(run, [held_out])).seconds

    (stage,) = run.stages
    twice = seconds(stage.steps // 2) - estimate(run).seconds
    assert twice > 1
    assert seconds(stage.steps // 4) - estimate(run).seconds == pytest.approx(2 * twice)
    sets = ["evaluation.validation.data={kind: own_sets, sets: [SETS]}"]
    own = "{name: a, path: 'sample://wikipedia/WikiSentenceRetrieval?first=1000'}"
    validated = override(run, [one.replace("SETS", own) for one in sets])
    assert estimate(validated).seconds > estimate(run).seconds + 1


def test_every_step_with_a_teacher_counts_and_each_teacher_once(milan):
    teacher = "teacher: hf://org/embedder@main"
    run = get_recipe("biencoder")
    clustered = override(run, [f"data.datasets.pairs.clusters={{{teacher}, batch_pairs: 64}}"])
    mined = [f"data.datasets.pairs.mining={{{teacher}}}", "stages.finetune.batch.num_negatives=7"]
    both = override(clustered, mined)
    assert estimate(clustered).data_seconds > estimate(run).data_seconds + 5
    assert estimate(both).data_seconds == estimate(clustered).data_seconds


def test_trials_share_their_data_and_the_cores(milan):
    run = get_recipe("nvembed-quickstart")
    alone = estimate(run)
    assert 0 < alone.data_seconds < alone.seconds
    unscored = override(run, ["evaluation.own_sets=[]", "evaluation.baselines=[]"])
    both = estimate_trials([run, run], [run], unscored)
    assert both.seconds == pytest.approx(2 * alone.seconds - alone.data_seconds)
    seeds = [run, override(run, ["seed=7"])]
    assert estimate_trials(seeds, seeds, unscored).seconds == pytest.approx(both.seconds)
    other = override(run, ["data.datasets.wiki-sentence.mining.teacher=another"])
    apart = estimate_trials([run, other], [run, other], unscored)
    assert both.seconds < apart.seconds < 2 * alone.seconds
    on_gpu = override(run, ["placement.use_gpu=true"])
    assert estimate_trials([run, on_gpu], [run], unscored) is None


def test_operations_are_told_of_gpus(milan):
    run = override(get_recipe("biencoder"), ["placement.use_gpu=true"])
    told = gpu_hours([run])
    operations = float(re.search(r"takes (\S+) floating", told)[1])
    # Three passes of 6 operations a token and weight: all-MiniLM has 10.6 million beside its table.
    tokens = sum(stage.steps * step_load(run, stage).tokens for stage in run.stages)
    assert operations == pytest.approx(0.8 * tokens * 6 * 10.6e6, rel=0.15)
    hours = float(re.search(r"about (\S+) GPU-hours", told)[1])
    assert hours == pytest.approx(operations / 140e12 / 3600, rel=0.05)
    twice = float(re.search(r"takes (\S+) floating", gpu_hours([run, run]))[1])
    assert twice == pytest.approx(2 * operations, rel=0.1)
    assert gpu_hours([run, get_recipe("biencoder")]) is None
    assert gpu_hours([override(run, ["model.backbone.path=hf://nobody/nothing@main"])]) is None


def test_nothing_is_told_of_gpus_and_of_models_that_only_the_hub_knows(milan):
    run = get_recipe("biencoder")
    assert estimate(run) is not None
    assert estimate(override(run, ["placement.use_gpu=true"])) is None
    assert estimate(override(run, ["model.backbone.path=hf://nobody/nothing@main"])) is None


def test_texts_of_a_teacher_are_counted_once_and_not_those_that_it_mined(milan):
    mined = "hf://org/mines@main"
    negatives = "stages.finetune.batch.num_negatives=7"
    settings = [f"data.datasets.pairs.mining.teacher={mined}", negatives]
    run = override(get_recipe("biencoder"), settings)

    def seconds(*references):
        teachers = ",".join(f"{{teacher: '{reference}'}}" for reference in references)
        loss = "stages.finetune.loss={kind: similarity_distillation}"
        changes = [loss, f"stages.finetune.teachers=[{teachers}]"]
        return estimate(override(run, changes)).seconds

    assert seconds(mined) == estimate(run).seconds
    assert seconds(mined, "hf://org/other@main") > seconds(mined) + 5


def test_a_teacher_in_the_step_takes_its_forward_passes(milan):
    states = "stages.finetune.hidden_states={teacher: whole}"
    apart = [
        estimate(override(get_recipe("biencoder"), changes)).seconds
        for changes in (
            ["placement.grad_cache=false"],
            ["placement.grad_cache=false", states],
            ["placement.grad_cache=true"],
            ["placement.grad_cache=true", states],
        )
    ]
    forward = apart[1] - apart[0]
    assert forward > 1
    assert apart[2] - apart[0] == pytest.approx(forward)
    assert apart[3] - apart[2] == pytest.approx(2 * forward)


def test_an_adaptation_is_counted_with_the_words_that_it_guesses(milan, tmp_path):
    recipes = pytest.importorskip("rayembed_extras.adaptation.recipes")
    run = recipes.get_adaptation("nomic-adapt-quickstart")
    training = run.training
    tokens = training.steps * training.global_sequences * run.corpus.max_length
    # all-MiniLM: 10.6 million weights beside its table of words, which is the head's as well.
    weights = 10.6e6 + run.masking.probability * 30522 * 384
    fixed = module._START_SECONDS + module._STAGE_SECONDS
    trained = estimate(override(run, ["training.held_out=null"])).seconds - fixed
    assert trained == pytest.approx(6 * tokens * weights / (140e9 * 0.45), rel=0.1)
    assert estimate(run).seconds > fixed + trained + 1
    assert estimate_trials([run, run], [run], run).seconds == pytest.approx(
        2 * estimate(run).seconds
    )
    unknown = override(run, [f"model.backbone.path={tmp_path}"])
    assert estimate(unknown) is None
    assert estimate(override(run, ["model.backbone.path=hf://nobody/nothing@main"])) is None
    adaptation = recipes.get_adaptation("nomic-adapt")
    assert "GPU-hours" in gpu_hours([adaptation])


def test_the_best_trial_is_scored_once_more_with_its_baselines(milan):
    compared = pytest.importorskip("rayembed_extras.sweeps.trials")
    run = get_recipe("nvembed-quickstart")
    trial = compared.compared_as(run, "trial")
    unscored = override(run, ["evaluation.own_sets=[]", "evaluation.baselines=[]"])
    alone, handed = (estimate_trials([trial], [trial], best) for best in (unscored, run))
    scores = estimate(run).seconds - estimate(unscored).seconds
    assert handed.seconds - alone.seconds == pytest.approx(scores)
    assert scores > 10


def test_auto_is_taken_as_this_machine_has_gpus(monkeypatch):
    run = get_recipe("biencoder")
    assert estimate(run) is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    facts = GpuFacts("here", "2.13.0", "13.0", "580.95.05", "NVIDIA H100")
    monkeypatch.setattr(gpu_check, "gpu_facts", lambda: facts)
    assert estimate(run) is None
    assert "GPU-hours" in gpu_hours([run])
