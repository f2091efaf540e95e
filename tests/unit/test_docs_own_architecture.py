"""docs/own_architecture.md, applied to a copy of the code: its model trains and comes back."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import prepared
import pytest

import rayembed
from rayembed.config.model import ModelConfig
from rayembed.config.settings import Settings, parse
from rayembed.errors import ConfigError

PLATFORM = Path(rayembed.__file__).parents[1]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
PAGE = (PLATFORM.parent / "docs" / "own_architecture.md").read_text()

SCRIPT = """
import sys
from pathlib import Path
import architecture_contract as contract
import torch
from tiny_models import LINES, save_encoder
import rayembed
from rayembed.config.backbone import BackboneConfig
from rayembed.config.model import ARCHITECTURES
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.passes.encoding import encode
from rayembed.models.loading.load import check_loadable
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """A copy of the code with the page's changes."""
    root = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns("*.egg-info")
    shutil.copytree(PLATFORM, root / "platform", ignore=leave)
    write_files(root)
    changes = "".join(blocks("diff"))
    assert changes.count("+++ ") == 1
    assert len(re.findall(r"^[+-](?![+-])", changes, re.MULTILINE)) == 1
    # A repository of its own: in another one's folder git would leave out what lies above.
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    command = ["git", "-C", str(root), "apply", "-C1", "-"]
    done = subprocess.run(command, input=changes, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root / "platform"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A package of its own with the page's files and entry point, beside the code as it is."""
    root = tmp_path_factory.mktemp("package")
    write_files(root, "platform/rayembed/models/layer_mix", "layer_mix")
    (points,) = blocks("toml")
    info = root / "layer_mix-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layer-mix\nVersion: 1.0\n")
    group, _, members = points.partition("\n")
    (name,) = re.findall(r'"(rayembed\.\w+)"', group)
    (info / "entry_points.txt").write_text(f"[{name}]\n{members.replace(chr(34), '')}")
    return os.pathsep.join([str(root), str(PLATFORM)])


def write_files(root, folder="", other=""):
    """Write the page's two files below a folder, under another name if one is given."""
    files = blocks("python")
    assert len(files) == 2
    for file in files:
        name, _, text = file.removeprefix("# ").partition("\n")
        path = root / (name.replace(folder, other) if folder else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("__init__.py").touch()
        path.write_text(text.replace("rayembed.models.layer_mix", "layer_mix") if folder else text)


def test_without_the_page_the_kind_is_refused():
    class Asked(Settings):
        model: ModelConfig

    with pytest.raises(ConfigError, match="'layer_mix': must be one of"):
        parse(Asked, {"model": {"kind": "layer_mix", "backbone": {"path": "x"}}})


@pytest.mark.parametrize("way", ["applied", "installed"])
def test_the_model_of_the_page_trains_and_comes_back(way, tmp_path, request):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + CHECKS)
    paths = request.getfixturevalue(way)
    path = f"{paths}{os.pathsep}{SUPPORT}"
    command = [sys.executable, str(script), str(tmp_path)]
    done = prepared.run(command, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    own = PLATFORM if way == "installed" else paths
    assert f"code of {own}\n" in done.stdout
    assert "kind: layer_mix" in done.stdout
    assert done.stdout.endswith("all is well\n")


CHECKS = """
print("code of", Path(rayembed.__file__).parents[1])
folder = Path(sys.argv[1])
backbone = save_encoder(folder / "encoder")
LayerMixConfig = ARCHITECTURES.classes()["layer_mix"]
config = LayerMixConfig(
    backbone=BackboneConfig(path=str(backbone), dtype="float32"),
    query_max_length=24,
    document_max_length=24,
)
model = build_model(config, backbone, seed=1)

# All weight on the last layer is a bi-encoder with mean pooling; equal weights are not.
plain = BiEncoderConfig(**config.model_dump(exclude={"kind", "lora"}))
wanted = encode(build_model(plain, backbone, seed=1).eval(), LINES, role="query")
assert abs(encode(model.eval(), LINES, role="query") - wanted).max() > 1e-3
with torch.no_grad():
    model.weights.logits[-1] = 100.0
assert abs(encode(model, LINES, role="query") - wanted).max() < 1e-5
with torch.no_grad():
    model.weights.logits.zero_()

# A few steps: the loss falls, and the weights of the layers move.
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = model.tokenizer(LINES, "query"), model.tokenizer(LINES[::-1], "document")
losses = []
for _ in range(12):
    queries, documents = (model(model.tokenizer.collate(part)).embeddings for part in tokens)
    logits = queries @ documents.T / 0.05
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(LINES)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
assert losses[-1] < 0.5 * losses[0], losses
assert model.weights.logits.detach().abs().max() > 1e-3

# Saved, it is a start with a trained head.
model.eval().save(folder / "saved")
assert isinstance(check_loadable(folder / "saved"), LayerMixConfig)
again = build_model(config, folder / "saved", seed=9).weights.logits
assert torch.equal(again, model.weights.logits), "a further stage starts from the trained head"

# The contract of every architecture: read back by us, by sentence-transformers and by MLflow, ...
parts = {"backbone": backbone}
contract.check_all(config, parts, folder)
contract.adapts(config, parts, folder / "adapted")

# Any recipe takes the kind: its weights, its dry run.
def trained(config):
    model = build_model(config, backbone, seed=1)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

assert trained(config) - trained(plain) == 3
recipe = ["--set", "name=mix", "--set", "model.kind=layer_mix"]
recipe += ["--set", f"model.backbone.path={backbone}", "--set", "model.query_max_length=24"]
recipe += ["--set", "model.document_max_length=24"]
assert training_job("biencoder-quickstart")([*recipe, "--dry-run"]) == 0
print("all is well")
"""
