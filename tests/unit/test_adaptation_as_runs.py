"""What holds for a training holds for an adaptation: dropped steps, elastic workers, estimates."""

import math
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_adaptation import tiny_adaptation

from rayembed.config.override import override
from rayembed.config.settings import changed, parse
from rayembed.errors import ConfigError
from rayembed.machine.hardware import Precision
from rayembed.optim.muon import Muon
from rayembed.pipeline.estimate import time as module
from rayembed.pipeline.estimate.time import estimate, estimate_trials, gpu_hours, work_of
from rayembed.training.contrastive.step import StepSettings
from rayembed_extras.adaptation.adapt import AdaptedEncoder, next_command
from rayembed_extras.adaptation.batch import MaskedBatch
from rayembed_extras.adaptation.masked import MaskedLanguage
from rayembed_extras.adaptation.masked_language import Predictions
from rayembed_extras.adaptation.recipes import get_adaptation, quickstart
from rayembed_extras.adaptation.settings import Adaptation
from rayembed_extras.adaptation.tables import adaptation_work


@pytest.fixture
def milan(monkeypatch):
    """Two cores of the machine on which the quickstart took 11 minutes."""
    float32 = Precision("float32", "this CPU emulates bfloat16 (30 times slower)")
    monkeypatch.setattr(module, "expected_precision", lambda run: float32)
    monkeypatch.setattr(module, "product_speed", lambda dtype: 70e9)
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    monkeypatch.setattr(module, "cpu_told", lambda: "2 cores (AMD EPYC)")


@pytest.mark.parametrize(("value", "finite"), [(0.0, True), (math.inf, False)])
def test_the_masked_step_guards_its_loss(value, finite):
    weight = torch.ones(2, requires_grad=True)
    ids, places = np.array([5, 6, 7], dtype=np.int32), np.array([1], dtype=np.int64)
    batch = MaskedBatch(0, [ids] * 2, [places] * 2, [ids[:1]] * 2, np.zeros(2, dtype=np.int64))

    def engine(micro):
        return Predictions(weight[: len(micro["words"])] + value, torch.ones(2, dtype=torch.bool))

    run = MaskedLanguage(["en"], None, SimpleNamespace(pad_id=0)).run_step
    loop_config = SimpleNamespace(global_rows=2)
    run(
        None,
        engine,
        lambda loss, _: loss.backward(),
        batch,
        loop_config,
        StepSettings(99, True, torch.device("cpu")),
    )
    assert bool(weight.grad.isfinite().all()) is finite


def test_an_adaptation_is_checked_alike(tmp_path):
    values = tiny_adaptation(tmp_path).model_dump(mode="json")
    rows = values["training"]["global_sequences"]
    values["placement"] |= {"workers": rows, "min_workers": 1}
    assert parse(Adaptation, values).placement.is_elastic
    values["placement"] |= {"workers": rows + 1}
    with pytest.raises(ConfigError, match=rf"global_sequences {rows} cannot be .* {rows + 1}"):
        parse(Adaptation, values)


def test_an_adaptation_takes_no_rate_of_a_loss_that_has_no_parameters():
    run = quickstart()
    with pytest.raises(ConfigError, match="loss_learning_rate has no effect"):
        override(run, ["training.optimizer.loss_learning_rate=0.1"])
    with pytest.raises(ConfigError, match=r"the adaptation: optimizer\.warmup_steps"):
        override(run, [f"training.optimizer.warmup_steps={run.training.steps}"])


def test_an_adaptation_is_counted_with_the_words_that_it_guesses(milan, tmp_path):
    run = get_adaptation("nomic-adapt-quickstart")
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
    adaptation = get_adaptation("nomic-adapt")
    assert "GPU-hours" in gpu_hours([adaptation])
    assert work_of(adaptation) == adaptation_work(adaptation)


def test_a_zero_stage_that_cannot_serve_is_refused():
    run = quickstart()
    adapted = changed(run, training=changed(run.training, optimizer=Muon(learning_rate=1e-3)))
    with pytest.raises(ConfigError, match="zero_stage 3 cannot serve"):
        override(adapted, ["placement.zero_stage=3"])


def test_the_command_that_is_printed_works_with_any_path():
    """Of a space or a quote a shell would make another word."""
    folder = "/runs of Zoë's/encoder"
    encoder = AdaptedEncoder(get_adaptation("nomic-adapt-quickstart"), folder, {})
    assert f"model.backbone.path={folder}" in shlex.split(next_command(encoder))
