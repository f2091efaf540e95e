"""No weight that is not finite is written, handed on, exported or registered."""

import json
import math

import pytest
import safetensors.torch
import torch
from broken_weights import model_that_overflows, model_with_a_nan
from sentence_transformers import SentenceTransformer
from tiny_folders import TINY, save_tiny
from tiny_models import save_encoder
from toy_model import ToyModel

from rayembed.assets.finite import check_finite, check_finite_files, is_finite
from rayembed.assets.hub import upload_model
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.contract import EmbeddingModel, EmbedOutput
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import load_weights
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import check_vectors
from rayembed.models.sentence_module import SentenceModule
from rayembed.registry.register import make_version
from rayembed.training.checkpoints.checkpoint import expected_position, find_damage, save_checkpoint
from rayembed.training.checkpoints.weights import read_made_of, write_weights

WRONG = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", WRONG)
def test_one_number_is_seen(dtype, value):
    tensor = torch.randn(7, 5).to(dtype)
    assert is_finite(tensor)
    tensor[3, 2] = value
    assert not is_finite(tensor)
    assert not is_finite(tensor[3].requires_grad_())


def test_what_has_no_such_numbers_is_finite():
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.arange(3))
    assert is_finite(torch.tensor([True]))
    largest = torch.finfo(torch.float32).max
    assert is_finite(torch.full((9,), largest)), "their sum would not be"


def test_the_message_names_the_tensor_and_counts():
    bad = torch.tensor([1.0, math.nan, math.inf])
    with pytest.raises(ArtifactError, match=r"the thing: 2 of the 3 numbers of 'b' are not finite"):
        check_finite([("a", torch.ones(2)), ("b", bad)], "the thing")


class Engine:
    def __init__(self, **state):
        self.state = state

    def written_states(self):
        yield "layer", self.state


@pytest.mark.parametrize("key", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_checkpoint_is_refused(tmp_path, key):
    state = {name: torch.ones(3) for name in ("weight", "exp_avg", "exp_avg_sq", "step")}
    position = expected_position("s", "run", "plan").at(6, 2)
    save_checkpoint(tmp_path, Engine(**state), position)
    assert find_damage(str(tmp_path)) is None
    assert json.loads((tmp_path / "position.json").read_text())["dropped_steps"] == 2
    state[key] = torch.tensor([1.0, math.nan, 1.0])
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ArtifactError, match=rf"checkpoint of step 6: 1 of the 3.*layer \({key}\)"):
        save_checkpoint(other, Engine(**state), position)
    assert list(other.iterdir()) == []


def test_weights_of_a_stage_are_refused(tmp_path):
    path = str(tmp_path / "weights.safetensors")
    write_weights(path, {"a": torch.ones(2)}, {"run": "this"})
    content = read_made_of(path)
    with pytest.raises(ArtifactError, match="'a' are not finite"):
        write_weights(path, {"a": torch.tensor([1.0, math.inf])}, {"run": "this"})
    assert read_made_of(path) == content


@pytest.mark.parametrize("projections", [[], [{"width": 8}]], ids=["backbone", "head"])
def test_an_export_is_refused_and_what_lies_there_stays(tmp_path, projections):
    values = {
        "backbone": {"path": "given", "dtype": "float32"},
        "query_max_length": 16,
        "document_max_length": 16,
        "projections": projections,
    }
    folders = {"backbone": save_encoder(tmp_path / "base")}
    model = build_model(parse(BiEncoderConfig, values), folders, seed=0)
    folder = tmp_path / "model"
    model.save(folder)
    check_finite_files(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0] = math.nan
    with pytest.raises(ArtifactError, match="are not finite"):
        model.save(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.safetensors")} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def runaway(model, rate):
    """The model after one step of AdamW, whose first updates are as large as its learning rate."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rate * torch.randn(parameter.shape, generator=generator).sign())
    return model


@pytest.mark.parametrize("kind", TINY)
def test_finite_weights_whose_vectors_are_not_are_not_exported_either(tmp_path, kind):
    folder = tmp_path / "model"
    ordinary = runaway(load_model(save_tiny(kind, tmp_path / "start")), 1e-4)
    ordinary.save(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    model = runaway(load_model(tmp_path / "start"), 1e30)
    check_finite(model.state_dict().items(), "the control: by its weights it is a model")
    with pytest.raises(ArtifactError, match=r"3 of 3 short test texts do not have length 1 .*nan"):
        model.save(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(ArtifactError, match="do not have length 1"):
        SentenceModule(model).save(str(tmp_path / "by sentence-transformers"))
    assert not (tmp_path / "by sentence-transformers").exists()


class OfZeros(EmbeddingModel):
    """A model whose vectors are divided by the root of their sum of squares, which overflows."""

    dimensions = (4,)
    length = math.inf

    def __init__(self):
        super().__init__()
        self.tokenizer = ToyModel().tokenizer
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, batch, context=None):
        return EmbedOutput(self.weight.expand(len(batch["input_ids"]), 4) / self.length)


def test_a_vector_of_zeros_is_none():
    model = OfZeros()
    with pytest.raises(ArtifactError, match=r"the model: .*begins with \[0\.0, 0\.0, 0\.0\]"):
        check_vectors(model, "the model")
    model.length = 2
    check_vectors(model, "the model")


def ways_out(folder, target):
    """Every other way by which weights of a folder become files, or leave the machine."""
    return {
        "saved by sentence-transformers": lambda: SentenceTransformer(
            str(folder), trust_remote_code=True
        ).save(str(target)),
        "the hub": lambda: upload_model(folder, "org/name", "card"),
    }


@pytest.mark.parametrize("way", ways_out(None, None))
def test_no_other_way_hands_them_on(tmp_path, way):
    folder = model_with_a_nan(tmp_path / "model")
    with pytest.raises(ArtifactError, match="are not finite"):
        ways_out(folder, tmp_path / "target")[way]()
    assert not list((tmp_path / "target").rglob("*.safetensors"))


def test_no_way_that_holds_a_model_hands_on_one_that_overflows(tmp_path):
    folder = model_that_overflows(tmp_path / "model")
    with pytest.raises(ArtifactError, match="do not have length 1"):
        ways_out(folder, tmp_path / "target")["saved by sentence-transformers"]()
    assert not list((tmp_path / "target").rglob("*.safetensors"))


def test_pickled_weights_are_looked_at_too(tmp_path):
    path = tmp_path / "0_Transformer" / "pytorch_model.bin"
    path.parent.mkdir()
    for zipped in (True, False):  # torch wrote no archives once
        content = {"a": torch.ones(3), "version": 2}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        check_finite_files(tmp_path)
    torch.save({"a": torch.tensor([1.0, math.nan])}, path)
    with pytest.raises(ArtifactError, match="1 of the 2 numbers of 'a' are not finite"):
        check_finite_files(tmp_path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ArtifactError, match="cannot read the weights"):
        check_finite_files(tmp_path)
    torch.save({"a": print}, path)  # code, which is not run
    with pytest.raises(ArtifactError, match="cannot read the weights"):
        check_finite_files(tmp_path)


def test_a_folder_is_not_registered(tmp_path):
    folder = tmp_path / "model"
    (folder / "0_Part").mkdir(parents=True)
    (folder / "modules.json").write_text("[]")
    path = folder / "0_Part" / "model.safetensors"
    safetensors.torch.save_file({"a": torch.tensor([math.nan])}, path)
    given = {"weights_fingerprint": "1", "dimensions": (1,), "global_step": 1}

    def put():
        make_version(folder, "m", tracker=None, instruction_template=None, **given)

    with pytest.raises(ArtifactError, match=r"model\.safetensors.*'a' are not finite"):
        put()
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    assert load_weights(path)["a"] == 1.0
    with pytest.raises(AttributeError):  # the control: then MLflow is asked, which is not there
        put()
