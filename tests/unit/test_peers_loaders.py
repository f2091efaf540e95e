"""Which loaders of mteb and folders of sentence-transformers are taken: none that runs code."""

import importlib
import inspect
import json
import linecache
import re
import sys
from importlib.metadata import version
from pathlib import Path

import mteb
import pytest
from mteb.models.model_implementations import MODEL_REGISTRY
from tiny_folders import save_nvembed

from rayembed.assets.sentence_modules import OWN_MODULE
from rayembed.config.evaluation import ModelUnderTest
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.load import load_model
from rayembed.models.sentence_module import as_sentence_transformer
from rayembed_extras.peers import loader_code
from rayembed_extras.peers.loader_code import GIVES_LEAVE, foreign_code, name_of, text_version
from rayembed_extras.peers.mteb_spec import _check_supported, _runs_code, mteb_spec
from rayembed_extras.peers.sentence_spec import sentence_spec

CODE = """from pathlib import Path
Path({marker!r}).touch()
class Module:
    pass
"""


def trap(folder, *types):
    """Have `modules.json` name classes, which are in the folder; the file that tells they ran."""
    modules = [{"idx": i, "name": str(i), "path": "", "type": t} for i, t in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(modules))
    marker = folder.parent / "was-run"
    for file in ("rayembed.py", "modeling.py", "sentence_module.py"):
        (folder / file).write_text(CODE.format(marker=str(marker)))
    return marker


@pytest.mark.parametrize(
    "types",
    [
        ("rayembed.Module",),  # a file rayembed.py of the folder
        ("modeling.Module",),
        (OWN_MODULE, "modeling.Module"),
        ("sentence_transformers.models.Transformer", "rayembed.Module"),
    ],
)
def test_code_of_a_folder_is_refused_before_anything_is_loaded(tmp_path, types):
    folder = tmp_path / "model"
    save_nvembed(folder, seed=1)
    marker = trap(folder, *types)
    with pytest.raises(ArtifactError, match="of its own code, which is never run"):
        sentence_spec(ModelUnderTest(reference=f"st:{folder}"))
    assert not marker.exists()


def test_a_folder_of_ours_with_such_files_loads_without_them(tmp_path):
    folder, alone = tmp_path / "model", tmp_path / "alone"
    for each in (folder, alone):
        save_nvembed(each, seed=1)
    marker = trap(folder, OWN_MODULE)
    spec = sentence_spec(ModelUnderTest(reference=f"st:{folder}"))
    encode_spec = spec.encode_spec(mteb.get_task("STS12").metadata, None)
    expected = as_sentence_transformer(alone, device="cpu").encode(["a cat"])
    assert (spec.load("cpu")(["a cat"], encode_spec) == expected).all()
    load_model(folder)
    assert not marker.exists()


def test_models_that_mteb_loads_with_remote_code_are_refused():
    """Which ones need it, mteb says in the arguments of their loaders."""
    given = {
        name: bool(meta.loader_kwargs.get("trust_remote_code"))
        for name, meta in MODEL_REGISTRY.items()
        if meta.model_type == ["dense"] and "text" in meta.modalities
    }
    needs = [name for name, flag in given.items() if flag]
    assert len(needs) > 5
    assert _runs_code(MODEL_REGISTRY["sentence-transformers/all-MiniLM-L6-v2"]) is None
    assert {_runs_code(MODEL_REGISTRY[name]) for name in needs} == {GIVES_LEAVE}
    with pytest.raises(
        ConfigError, match=r"gives trust_remote_code, .* so rayembed does not use it"
    ):
        mteb_spec(ModelUnderTest(reference=f"mteb:{needs[0]}"))


@pytest.mark.parametrize(
    "name",
    [
        "llm-semantic-router/multi-modal-embed-large",  # trusts remote code in a helper
        "llm-semantic-router/multi-modal-embed-small",  # unpickles a file of the hub in one
        "QuanSun/EVA02-CLIP-B-16",  # runs code of no installed package
    ],
)
def test_loaders_that_were_not_read_are_refused(name):
    with pytest.raises(
        ConfigError, match=r"is not among the loaders of .* so rayembed does not use it"
    ):
        mteb_spec(ModelUnderTest(reference=f"mteb:{name}"))


OTHERS_OF_THE_MODULE = {
    "clap_models": "the options of another of its models",
    "unite_models": "a comment",
    "vlm2vec_models": "the loader of its other models",
    "voyage_models": "the options of another of its models",
}
"""Modules that hold such words, though the accepted loader in them does not reach these."""


def test_the_list_is_of_the_installed_mteb_and_of_dense_models_alone():
    """After an upgrade of mteb the loaders that changed are read, and their versions written down.

    A loader may be listed when neither it nor what it calls of mteb gives trust_remote_code or
    allow_pickle, loads with torch.load (but weights_only=True), torch.jit or pickle, or runs files.
    """
    listed = json.loads(Path(loader_code.__file__).with_name(loader_code.FILE).read_text())
    accepted = [meta for name, meta in MODEL_REGISTRY.items() if _is_accepted(name, meta)]
    assert len(accepted) > 500
    loaders = {getattr(meta.loader, "func", meta.loader) for meta in accepted}
    now = {name_of(loader): text_version(loader) for loader in loaders}
    assert listed == {"mteb": version("mteb"), "loaders": now}
    # Beside the reading: words that would tell of such code.
    words = re.compile(
        r"trust_remote_code(?!\s*[:=]\s*(bool|False))|weights_only=False|allow_pickle|sys\.path"
        r"|\b(pickle|joblib|dill|exec|__import__|subprocess|Popen|runpy|read_pickle)\b"
        r"|(?<!\.)\beval\(|torch\.(hub|jit)|from torch import .*\b(load|jit|hub)\b"
        r"|import torch(\.jit|\.hub|\.serialization)? as|os\.(system|exec|spawn)|import_module"
    )
    modules = {loader.__module__ for loader in loaders}
    hits = {
        m.rpartition(".")[2] for m in modules if words.search(inspect.getsource(sys.modules[m]))
    }
    assert hits <= OTHERS_OF_THE_MODULE.keys()
    loads = re.compile(r"torch\.load\((?:[^()]|\([^()]*\))*\)")
    calls = [call for m in modules for call in loads.findall(inspect.getsource(sys.modules[m]))]
    assert calls
    assert all("weights_only=True" in call for call in calls)
    # The control: the words are found where loaders are refused.
    refused = "mteb.models.model_implementations.semantic_router_multimodal_models"
    assert words.search(inspect.getsource(sys.modules[refused]))


def _is_accepted(name, meta):
    if meta.loader is None:
        return False
    try:
        _check_supported(name, meta)
    except ConfigError:
        return False
    return True


LOADER = """
{top}
class Loader:
    def __init__(self, name):
        {more}
"""


@pytest.mark.parametrize(
    ("top", "more"),
    [
        ("", "pass"),
        ("from mteb.models import made_trusting as h", "h.load(name)"),
        ("import mteb.models.made_trusting as h", "h.load(name)"),
        ("import torch as th", "th.load(name)"),
        ("from torch import load", "load(name)"),
        ("import torch", "torch.jit.load(name)"),
        ("import pandas as pd", "pd.read_pickle(name)"),
        ("import os", "os.system(name)"),
        ("from subprocess import run", "run(name)"),
        ("", "load_model(name, None, True)"),
        ("import torch", "getattr(torch, 'lo' + 'ad')(name)"),
    ],
)
def test_no_alias_leads_past_the_list(tmp_path, monkeypatch, top, more):
    """Whatever a loader of mteb does: it was read, or it is refused."""
    found = foreign_code(_made_up(tmp_path, monkeypatch, top, more))
    assert found is not None
    assert "is not among the loaders of" in found


def test_a_loader_that_was_read_is_taken_as_long_as_its_text_is_that(tmp_path, monkeypatch):
    loader = _made_up(tmp_path, monkeypatch, "import torch", "pass")
    listed = {"mteb": "2.26.24", "loaders": {name_of(loader): text_version(loader)}}
    monkeypatch.setattr(loader_code, "_looked_at", lambda: listed)
    assert foreign_code(loader) is None
    changed = _made_up(tmp_path, monkeypatch, "import torch as th", "th.load(name)")
    assert name_of(changed) == name_of(loader)
    assert "other source code than in mteb 2.26.24" in foreign_code(changed)


def test_loaders_of_other_packages_are_what_the_user_installed():
    assert foreign_code(ModelUnderTest) is None


def _made_up(tmp_path, monkeypatch, top, more):
    """A loader of a module of mteb that is not there."""
    import mteb.models

    monkeypatch.setattr(mteb.models, "__path__", [*mteb.models.__path__, str(tmp_path)])
    (tmp_path / "made_trusting.py").write_text("def load(name):\n    return name\n")
    (tmp_path / "made_up.py").write_text(LOADER.format(top=top, more=more))
    importlib.invalidate_caches()
    loader_code._text.cache_clear()
    linecache.clearcache()
    monkeypatch.delitem(sys.modules, "mteb.models.made_up", raising=False)
    module = importlib.import_module("mteb.models.made_up")
    monkeypatch.delattr(mteb.models, "made_up")
    return module.Loader


def test_options_that_a_loader_was_made_with_are_looked_at():
    def made(**options):
        def loader(**kwargs):
            return (options, kwargs)

        return loader

    assert foreign_code(made(model="a", trust_remote_code=False)) is None
    assert foreign_code(made(model_kwargs={"trust_remote_code": True})) == GIVES_LEAVE
