"""Folders of models that bring code along: it is never run, whatever they say of themselves."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_folders import save_biencoder, save_nvembed
from tiny_models import save_encoder

from rayembed.assets.finite import check_finite_files
from rayembed.assets.sentence_modules import (
    OWN_MODULE,
    foreign_modules,
    is_own_format,
    module_types,
)
from rayembed.data.mining.rescoring import _saved_names
from rayembed.errors import ArtifactError
from rayembed.models.loading.backbones import check_backbone
from rayembed.models.loading.load import load_model
from rayembed.pipeline.register.registration import check_registrable

CODE = """from pathlib import Path
Path({marker!r}).touch()
class Module:
    pass
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    save_nvembed(home / "nvembed", seed=1)
    save_biencoder(home / "biencoder", seed=1)
    return home


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", ["", "2_Dense"])
def test_a_pickle_with_objects_is_refused_without_advice_to_run_it(tmp_path, place):
    encoder = save_encoder(tmp_path / "encoder")
    modules = [Transformer(str(encoder)), Pooling(32), Dense(32, 8)]
    folder = tmp_path / "model"
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    weights = safetensors.torch.load_file(folder / place / "model.safetensors")
    (folder / place / "model.safetensors").unlink()
    marker = tmp_path / "was-run"
    torch.save({**weights, "more": Trap(marker)}, folder / place / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="which can run code when they are read") as told:
        load_model(folder)
    assert "weights_only" not in str(told.value)
    assert not marker.exists()


@pytest.fixture
def trapped(made, tmp_path):
    """A copy of a model whose `modules.json` names classes; they are in the folder, with a trap."""

    def copy(name, *types):
        folder = tmp_path / name
        shutil.copytree(made / name, folder)
        modules = [{"idx": i, "name": str(i), "path": "", "type": t} for i, t in enumerate(types)]
        (folder / "modules.json").write_text(json.dumps(modules))
        marker = tmp_path / "was-run"
        for file in ("rayembed.py", "modeling.py", "sentence_module.py"):
            (folder / file).write_text(CODE.format(marker=str(marker)))
        return folder, marker

    return copy


def test_our_own_format_is_known_by_the_exact_class(made):
    assert is_own_format(made / "nvembed")
    assert module_types(made / "nvembed") == [OWN_MODULE]
    assert foreign_modules(made / "nvembed") == []
    assert not is_own_format(made / "biencoder")
    assert foreign_modules(made / "biencoder") == []


@pytest.mark.parametrize(
    "types",
    [
        ("rayembed.Module",),  # a file rayembed.py of the folder
        ("modeling.Module",),
        (OWN_MODULE, "modeling.Module"),
        ("sentence_transformers.models.Transformer", "rayembed.Module"),
    ],
)
def test_code_of_a_folder_is_refused_before_anything_is_loaded(trapped, types):
    folder, marker = trapped("nvembed", *types)
    assert not is_own_format(folder)
    assert foreign_modules(folder)
    with pytest.raises(ArtifactError, match="code that it brings itself, which is never run"):
        check_registrable(folder)
    assert not marker.exists()


@pytest.fixture
def runs_code(monkeypatch, tmp_path):
    """Lets transformers keep what it runs in a place of this test, and says yes when asked."""
    place = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("builtins.input", lambda question: "y")


def test_with_the_flag_that_is_never_given_the_code_would_run(trapped, runs_code):
    """The control: sentence-transformers runs a folder's file under our package's name."""
    from sentence_transformers.util.misc import import_module_class

    folder, marker = trapped("nvembed", "rayembed.Module")
    import_module_class("rayembed.Module", str(folder), trust_remote_code=True)
    assert marker.exists()


def test_nobody_at_a_terminal_is_asked_whether_to_run_code(trapped, runs_code):
    folder, marker = trapped("biencoder")
    (folder / "modules.json").unlink()
    (folder / "rayembed.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "modeling.Module"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(ArtifactError, match="contains custom code"):
        check_backbone(folder)
    with pytest.raises(ArtifactError, match="contains custom code"):
        load_model(folder)
    assert not marker.exists()
    # The control: transformers' own choice is to ask.
    with pytest.raises(AttributeError, match="type object 'Module'"):
        transformers.AutoConfig.from_pretrained(str(folder))
    assert marker.exists()


class Harmful:
    """An object whose pickle runs code when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def test_pickled_weights_with_objects_are_refused_with_true_advice(tmp_path):
    folder, marker = tmp_path / "model", tmp_path / "was-run"
    save_encoder(folder, seed=0)
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(2), "b": Harmful(str(marker))}, folder / "pytorch_model.bin")
    for read in (load_model, check_finite_files, _saved_names):
        with pytest.raises(ArtifactError, match="objects other than tensors") as error:
            read(folder)
        assert "safetensors" in str(error.value)
        assert "weights_only" not in str(error.value)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(ArtifactError, match="damaged") as error:
        load_model(folder)
    assert "weights_only" not in str(error.value)
    assert not marker.exists()
