"""What holds for a model holds for its variants: finite weights, number types, short names."""

import logging
from types import SimpleNamespace

import pytest
import torch
from broken_weights import model_that_overflows, model_with_a_nan
from tiny_folders import save_tiny
from tiny_models import LINES, save_encoder

from rayembed.config.backbone import BackboneConfig
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.types import SHORT_NAMES
from rayembed.errors import ArtifactError
from rayembed.machine import hardware
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.pipeline.evaluate.variants import Scored
from rayembed_extras.compression import compress
from rayembed_extras.compression.calibration import loaded_as_saved
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.gptq import GPTQ
from rayembed_extras.compression.job import run_compression_job
from rayembed_extras.compression.measure import Measured
from rayembed_extras.compression.quantised import Int8
from rayembed_extras.compression.run_settings import SpeedConfig
from rayembed_extras.compression.runtimes import Onnx
from rayembed_extras.compression.sizes_job import run_sizes_job

EMULATED, WITH_UNITS = 1 / 30, 2.4


@pytest.fixture
def machine(monkeypatch, caplog):
    """Sets the CPU's speed in bfloat16, and the GPU that torch sees."""
    caplog.set_level(logging.INFO)
    hardware.say_once.cache_clear()

    def become(speed, gpu=None):
        monkeypatch.setattr(hardware, "bfloat16_speed", lambda: speed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(hardware, "_gpu", lambda device: gpu)

    yield become
    hardware.say_once.cache_clear()


@pytest.fixture
def saved(tmp_path):
    """Folder of a model of rayembed's own, saved in bfloat16."""
    backbone = BackboneConfig(path="unused", dtype="bfloat16")
    config = BiEncoderConfig(backbone=backbone, query_max_length=20, document_max_length=20)
    build_model(config, save_encoder(tmp_path / "b"), seed=1).eval().save(tmp_path / "saved")
    return tmp_path / "saved"


def types_of(model):
    return {parameter.dtype for parameter in model.parameters()}


def test_quantised_weights_that_overflow_are_refused(tmp_path, monkeypatch):
    source = CompressionSource(save_tiny("nvembed", tmp_path / "model"), [])
    Int8().compress(source, tmp_path / "ordinary")
    ordinary = Int8.weights

    def too_large(*given):
        made = ordinary(*given)
        return {name: one._replace(scale=one.scale * 1e30) for name, one in made.items()}

    monkeypatch.setattr(Int8, "weights", too_large)
    with pytest.raises(ArtifactError, match="do not have length 1"):
        Int8().compress(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_calibration_in_an_emulated_type_is_warned_of(machine, caplog, saved):
    gptq, int8 = GPTQ(), Int8()
    machine(EMULATED)
    assert types_of(loaded_as_saved(int8, saved)) == {torch.bfloat16}
    assert not caplog.records, "nothing is computed for it"
    assert types_of(loaded_as_saved(gptq, saved)) == {torch.bfloat16}
    assert "calibration of gptq computes in bfloat16, in which the model is saved" in caplog.text
    machine(WITH_UNITS)
    hardware.say_once.cache_clear()
    loaded_as_saved(gptq, saved)
    assert len(caplog.records) == 1, "there it is fast"


@pytest.mark.parametrize("speed", [WITH_UNITS, EMULATED])
def test_the_speed_of_variants_is_measured_in_the_type_of_their_scores(
    machine, monkeypatch, saved, tmp_path, speed
):
    machine(speed)
    variant = Scored("original", compress.CompressedModel(str(tmp_path), saved))
    seen = []

    def measure(folder, documents, *, dtype, **_):
        seen.append(dtype)
        return Measured(1.0, 0)

    monkeypatch.setattr(compress, "measure", measure)
    for asked in ("auto", "saved", "float32", "bfloat16"):
        under_test = ModelUnderTest(reference=str(variant.made.folder), dtype=asked)
        run = SimpleNamespace(model=under_test, speed=SpeedConfig(rounds=1))
        compress._measured(run, [variant], ["a text"])
    auto = "bfloat16" if speed == WITH_UNITS else "float32"
    assert seen == [auto, "bfloat16", "float32", "bfloat16"]


@pytest.mark.parametrize("way", [Int8(), Onnx()], ids=["int8", "a graph"])
@pytest.mark.parametrize(
    ("broken", "words"),
    [(model_with_a_nan, "are not finite"), (model_that_overflows, "do not have length 1")],
)
def test_no_way_hands_on_a_broken_model(tmp_path, way, broken, words):
    source = CompressionSource(
        broken(tmp_path / "model"), [CalibrationText(text) for text in LINES]
    )
    with pytest.raises(ArtifactError, match=words):
        way.compress(source, tmp_path / "target")
    assert not list((tmp_path / "target").rglob("*.safetensors"))
    assert not list((tmp_path / "target").rglob("graph*"))


def test_jobs_take_a_short_name_for_what_it_stands_for():
    short, meant = next(iter(SHORT_NAMES.items()))
    asked = ["--model", short]
    compressed = run_compression_job.resolve([*asked, "--way", "int8"])[0]
    assert compressed.model.reference == meant
    assert run_sizes_job.resolve(asked)[0].run.model.backbone.path == meant
