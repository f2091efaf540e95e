"""Scores of held-out words: those that are no numbers end an adaptation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_adaptation import save_masked, tiny_adaptation, write_corpus

from rayembed.config.override import override
from rayembed.errors import ArtifactError, DataError, DivergenceError
from rayembed.training.objective import StepSettings
from rayembed_extras.adaptation import adapt
from rayembed_extras.adaptation.batch import MaskedBatch
from rayembed_extras.adaptation.masked import MaskedLanguage
from rayembed_extras.adaptation.masked_language import Predictions


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptation")
    save_masked(folder / "bert")
    write_corpus(folder)
    return folder


def adapted(corpus, name, *changes):
    """The encoder's folder, of a run in this process."""
    run = tiny_adaptation(corpus)
    settings = ("placement.runtime=local", "training.optimizer.warmup_steps=0", *changes)
    return adapt.adapt(override(run, [f"name={name}", *settings])).folder


@pytest.mark.parametrize("steps", [1, 2])
def test_a_perplexity_that_is_not_finite_ends_the_run(corpus, steps):
    """After the last update nothing is dropped, or one step, which its batch might explain."""
    length = f"training.steps={steps}"
    ordinary = adapted(corpus, f"ordinary{steps}", length, "training.optimizer.learning_rate=1e-3")
    assert ordinary.endswith("models/encoder")
    rate = "training.optimizer.learning_rate=1e30"
    told = rf"after step {steps} are not finite \(held_out/perplexity nan, .* and 1 more; .*"
    with pytest.raises(DivergenceError, match=told + r"lower training\.optimizer\.learning_rate"):
        adapted(corpus, f"wild{steps}", length, rate)
    left = (corpus / "outputs" / "runs" / f"wild{steps}").rglob("*.safetensors")
    assert list(left) == [], "neither a checkpoint nor weights nor an encoder"


def test_without_held_out_texts_the_encoder_is_tried_before_it_is_saved(corpus):
    unscored = ("training.steps=1", "training.held_out=null")
    adapted(corpus, "unscored", *unscored, "training.optimizer.learning_rate=1e-3")
    with pytest.raises(ArtifactError, match=r"are \[nan, nan, nan\].*all weights are finite"):
        adapted(corpus, "unscored-wild", *unscored, "training.optimizer.learning_rate=1e30")
    assert not (corpus / "outputs/runs/unscored-wild/models/encoder").exists()


@pytest.mark.parametrize("masked", [1, 0])
def test_held_out_batches_without_a_masked_token_are_told(masked):
    """Their perplexity would be no number either, and no learning rate the reason."""
    ids, places = np.array([5, 6, 7], dtype=np.int32), np.arange(masked)
    batch = MaskedBatch(0, [ids], [places], [ids[:masked]], np.zeros(1, dtype=np.int64))

    def engine(micro):
        losses = torch.zeros(len(micro["words"]))
        return Predictions(losses, losses == 0)

    score = MaskedLanguage(["en"], None, SimpleNamespace(pad_id=0)).score
    settings = StepSettings(99, True, torch.device("cpu"))
    if masked:
        assert score(engine, [batch], settings)["perplexity"] == 1.0
    else:
        with pytest.raises(DataError, match=r"raise training\.held_out\.masking\.probability"):
            score(engine, [batch], settings)
