"""The number type of models that sentence-transformers loads: decided once, for what computes."""

import logging

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from small_device import RAN_OUT
from tiny_folders import save_biencoder
from tiny_models import save_cde_stages, save_encoder

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import parse
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.run_scores import make_spec
from rayembed.machine import hardware
from rayembed.machine.hardware import Precision
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed_extras.peers.sentence_spec import TextsAtOnce

EMULATED, WITH_UNITS = 1 / 30, 2.4
NARROW = Precision("float32", "this GPU (Tesla T4, 7.5) has no units for bfloat16")
WIDE = Precision("bfloat16", "this CPU has units for it (2.4 times float32)")


@pytest.fixture
def machine(monkeypatch, caplog):
    """Sets the CPU's speed in bfloat16, on a machine without a GPU."""
    caplog.set_level(logging.INFO)
    hardware.say_once.cache_clear()

    def become(speed):
        monkeypatch.setattr(hardware, "bfloat16_speed", lambda: speed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    yield become
    hardware.say_once.cache_clear()


@pytest.fixture
def plain(tmp_path):
    """Folder of an encoder in transformers' format, saved in bfloat16."""
    folder = save_encoder(tmp_path / "plain")
    transformers.AutoModel.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("own", [False, True])
def test_results_of_st_with_auto_are_those_of_one_type(machine, plain, tmp_path, own):
    """A CDE, whose export sentence-transformers loads by rayembed's own module."""
    folder = save_cde(tmp_path / "cde") if own else plain
    asked = ModelUnderTest(reference=f"st:{folder}")
    machine(WITH_UNITS)
    kept = make_spec(asked)
    machine(EMULATED)
    wide = make_spec(asked)
    assert (kept.settings.dtype, wide.settings.dtype) == ("saved", "float32")
    assert kept.fingerprint != wide.fingerprint
    assert kept.meta.revision != wide.meta.revision
    # What one machine decided holds on any other.
    assert loaded_types(kept) == {torch.bfloat16}
    machine(WITH_UNITS)
    assert loaded_types(wide) == {torch.float32}


def test_auto_stays_where_it_is_one_type_everywhere(machine, tmp_path):
    asked = ModelUnderTest(reference=f"st:{save_encoder(tmp_path / 'b')}")
    for speed in (EMULATED, WITH_UNITS):
        machine(speed)
        assert make_spec(asked).settings == asked


def loaded_types(spec):
    """Types of the weights of the model that a spec loads."""
    seen = []

    def encode(model, texts, **_):
        seen.append({parameter.dtype for parameter in model.parameters()})
        return torch.zeros(len(texts), 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SentenceTransformer, "encode", encode)
        spec.load("cpu")(["a"], EncodeSpec("document"))
    return seen[0]


def save_cde(folder):
    """Folder of a tiny CDE, saved in bfloat16."""
    settings = {
        "backbone": {"path": "given", "dtype": "bfloat16"},
        "encoder": {"path": "given"},
        "num_context": 3,
        "query_max_length": 32,
        "document_max_length": 32,
    }
    stages = save_cde_stages(folder / "stages")
    build_model(parse(CDEConfig, settings), stages, seed=5).eval().save(folder / "saved")
    return folder / "saved"


def test_a_named_type_that_is_emulated_is_warned_of(machine, caplog, plain):
    asked = ModelUnderTest(reference=f"st:{plain}", dtype="bfloat16")
    machine(WITH_UNITS)
    make_spec(asked)
    assert "asked for" not in caplog.text
    machine(EMULATED)
    assert make_spec(asked).settings == asked
    assert "bfloat16 was asked for, but this CPU emulates" in caplog.text


def test_scores_with_rounded_products_have_a_revision_of_their_own(machine, tmp_path):
    folder = save_encoder(tmp_path / "b")
    rounded, exact = (
        make_spec(ModelUnderTest(reference=f"st:{folder}", dtype=dtype))
        for dtype in ("tf32", "float32")
    )
    assert rounded.conditions["dtype"] == "tf32"
    assert rounded.fingerprint != exact.fingerprint
    assert rounded.meta.revision != exact.meta.revision
    assert loaded_types(rounded) == {torch.float32}


@pytest.mark.parametrize(("here", "there"), [(WITH_UNITS, NARROW), (EMULATED, WIDE)])
def test_the_type_is_that_of_what_computes(machine, plain, here, there):
    machine(here)
    spec = make_spec(ModelUnderTest(reference=f"st:{plain}"), on=there)
    assert spec.settings.dtype == ("saved" if there is WIDE else "float32")


def test_results_of_small_vectors_have_a_revision_of_their_own(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    plain = make_spec(ModelUnderTest(reference=str(folder)))
    weights = plain.meta.revision.partition("-")[0]
    small = make_spec(ModelUnderTest(reference=f"st:{folder}", precision="binary"))
    assert small.meta.revision.startswith(f"binary1-{weights}-")


@pytest.mark.parametrize("error", RAN_OUT, ids=str)
def test_memory_that_runs_out_in_a_library_halves_its_texts(error):
    other = RuntimeError("CUDA error: an illegal memory access was encountered")
    tried = []

    def some(number, error=error):
        tried.append(number)
        if number > 2:
            raise error
        return number

    assert TextsAtOnce(9)(some) == 2
    assert tried == [9, 4, 2]
    with pytest.raises(RuntimeError, match="illegal"):
        TextsAtOnce(9)(lambda number: some(number, other))
