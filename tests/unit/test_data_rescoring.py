"""How a cross-encoder scores pairs: batches by tokens, and the number type."""

import random
import shutil
from pathlib import Path

import mining_by_hand as by_hand
import numpy as np
import pytest
import torch
from mining_step import configured, dataset_of, prepared
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder as SentenceCrossEncoder
from tiny_models import save_cross_encoder
from torch import nn

from rayembed.config.mining import CrossEncoder
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.mining import rescoring
from rayembed.data.mining.mine import make_mined
from rayembed.data.mining.rescoring import load_cross_encoder
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.teacher import TeacherLoader, weights_of
from rayembed.machine.hardware import Precision

WORDS = ["cats", "dogs", "live", "fox", "jumps", "river", "ancient", "world", "Paris", "France"]


@pytest.fixture(autouse=True)
def no_model_is_kept():
    yield
    rescoring._load.cache_clear()


def pairs_of(number: int) -> list[tuple[str, str]]:
    """Pairs of a few to about sixty tokens, in no order."""
    drawn = random.Random(0)
    return [
        (drawn.choice(WORDS), " ".join(drawn.choices(WORDS, k=drawn.randint(1, 45))))
        for _ in range(number)
    ]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_cut_by_tokens_and_score_as_sentence_transformers(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_cross_encoder(tmp_path / side)
    tokenizer = SentenceCrossEncoder(str(folder)).tokenizer
    tokenizer.padding_side = side
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(rescoring, "_TOKENS_PER_BATCH_CPU", 256)
    monkeypatch.setattr(rescoring, "_PAIRS_TOKENISED", 70)
    shapes, forward = [], SentenceCrossEncoder.forward

    def spy(model, batch, **named):
        shapes.append((batch["attention_mask"].numel(), int(batch["attention_mask"].sum())))
        return forward(model, batch, **named)

    pairs = pairs_of(200)
    wanted = SentenceCrossEncoder(str(folder)).predict(pairs)
    monkeypatch.setattr(SentenceCrossEncoder, "forward", spy)
    score = load_cross_encoder(CrossEncoder(model=str(folder), dtype="float32"), side)
    np.testing.assert_allclose(score(pairs), wanted, atol=1e-6)
    assert max(padded for padded, _ in shapes) <= 256
    padded, real = np.sum(shapes, axis=0)
    assert padded < 1.15 * real, "of a pair of sixteen, as they came, it would be twice"
    assert score([]).shape == (0,)


def test_in_bfloat16_the_layers_of_the_score_compute_in_float32(tmp_path: Path) -> None:
    folder = save_cross_encoder(tmp_path / "reranker")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"] *= 0.05  # scores that differ in their last digits alone
    weights["classifier.bias"].fill_(3.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    types, forward = {}, nn.Linear.forward

    def spy(layer, states):
        made = forward(layer, states)
        types.setdefault(layer.weight.dtype, set()).add(made.dtype)
        return made

    pairs = pairs_of(60)
    exact = load_cross_encoder(CrossEncoder(model=str(folder), dtype="float32"), "w")(pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", spy)
        score = load_cross_encoder(CrossEncoder(model=str(folder), dtype="bfloat16"), "w")
        halved = score(pairs)
    assert types == {torch.bfloat16: {torch.bfloat16}}, "all but the last, which is its own class"
    assert halved.dtype == np.float32
    assert not np.array_equal(halved, exact)
    np.testing.assert_allclose(halved, exact, atol=3e-3)
    # Of bfloat16 there are three numbers between these scores.
    assert len({*halved.tolist()}) > 0.9 * len({*exact.tolist()})
    as_bfloat16 = torch.from_numpy(np.log(exact / (1 - exact))).bfloat16()
    assert len({*as_bfloat16.tolist()}) < 20


def loader_of(dtype: str) -> TeacherLoader:
    """Teachers of a machine that computes a number type fast."""
    return TeacherLoader(
        by_hand.load,
        lambda reference: reference if reference == "a" else weights_of(reference),
        lambda: Precision(dtype, "so"),
    )


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Number types that cross-encoders are loaded in."""
    types: list[str] = []
    model = rescoring._model

    def spy(reference, max_length, device, dtype):
        types.append(dtype)
        return model(reference, max_length, device, dtype)

    monkeypatch.setattr(rescoring, "_model", spy)
    return types


def test_auto_is_settled_by_the_machine_and_stays_where_the_folder_was_begun(
    tmp_path: Path, taken: list[str]
) -> None:
    folder = str(save_cross_encoder(tmp_path / "reranker"))
    before = prepared(tmp_path, by_hand.made_up_rows(20, 4), 2)

    def mined(fast: str, units_done: int = 100, **rescored):
        rescoring._load.cache_clear()
        left = [units_done]

        def execute(task, units, needs):
            for unit in units:
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                yield task(unit)

        config = configured(
            dtype="float32", rescoring={"model": folder, "max_length": 24, **rescored}
        )
        context = PipelineContext(str(tmp_path / "out"), 0, execute, loader_of(fast))
        return make_mined(context, dataset_of(config), before, HeldOut())

    with pytest.raises(KeyboardInterrupt):
        mined("bfloat16", 3)
    made = mined("float32")  # on a machine without units for bfloat16
    assert taken == ["bfloat16", "bfloat16"]
    assert made.manifest["cross_encoder"] == {
        "model": folder,
        "weights": weights_of(folder),
        "dtype": "bfloat16",
    }
    named = mined("float32", dtype="float32")
    assert taken[2:] == ["float32"]
    assert named.folder != made.folder
    assert mined("float32", dtype="bfloat16").folder not in (made.folder, named.folder)
    shutil.rmtree(made.folder)
    assert mined("float32").manifest["cross_encoder"]["dtype"] == "float32"
