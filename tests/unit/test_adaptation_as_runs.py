"""What holds for a training holds for an adaptation: dropped steps, elastic workers."""

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
from rayembed.optim.muon import Muon
from rayembed.training.contrastive.step import StepSettings
from rayembed_extras.adaptation.adapt import AdaptedEncoder, next_command
from rayembed_extras.adaptation.batch import MaskedBatch
from rayembed_extras.adaptation.masked import MaskedLanguage
from rayembed_extras.adaptation.masked_language import Predictions
from rayembed_extras.adaptation.recipes import get_adaptation, quickstart
from rayembed_extras.adaptation.settings import Adaptation


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


def test_a_zero_stage_that_cannot_serve_is_refused():
    run = quickstart()
    adapted = changed(run, training=changed(run.training, optimizer=Muon(learning_rate=1e-3)))
    with pytest.raises(ConfigError, match="zero_stage 3 does not support"):
        override(adapted, ["placement.zero_stage=3"])


def test_the_command_that_is_printed_works_with_any_path():
    """Of a space or a quote a shell would make another word."""
    folder = "/runs of Zoë's/encoder"
    encoder = AdaptedEncoder(get_adaptation("nomic-adapt-quickstart"), folder, {})
    assert f"model.backbone.path={folder}" in shlex.split(next_command(encoder))
