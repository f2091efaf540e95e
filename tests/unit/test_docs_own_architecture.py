"""docs/own_architecture.md, applied to a copy of the code: its model trains and comes back."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
import torch
from tiny_models import LINES, save_encoder
import rayembed
from rayembed.config.backbone import BackboneConfig
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.config.model import LayerMixConfig
from rayembed.models.build import build_model
from rayembed.models.encoding import encode
from rayembed.models.load import check_loadable, load_model
from rayembed.models.sentence_module import as_sentence_transformer
from rayembed.pipeline.requirements import model_size
from rayembed.pipeline.training_job import training_job
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.model_card import model_card
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """A copy of the code with the page's changes."""
    root = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(PLATFORM, root / "platform", ignore=leave)
    files = blocks("python")
    assert len(files) == 2
    for file in files:
        name, _, text = file.removeprefix("# ").partition("\n")
        (root / name).write_text(text)
    changes = "".join(blocks("diff"))
    assert changes.count("+++ ") == 7
    # A repository of its own: in another one's folder git would leave out what lies above.
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    command = ["git", "-C", str(root), "apply", "-C1", "-"]
    done = subprocess.run(command, input=changes, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def test_without_the_page_the_kind_is_refused():
    class Asked(Settings):
        model: ModelConfig

    with pytest.raises(ConfigError, match="'layer_mix': must be one of"):
        parse(Asked, {"model": {"kind": "layer_mix", "backbone": {"path": "x"}}})


def test_the_model_of_the_page_trains_and_comes_back(applied, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + CHECKS)
    path = os.pathsep.join([str(applied / "platform"), str(SUPPORT)])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"code of {applied}" in done.stdout
    assert "kind: layer_mix" in done.stdout
    assert done.stdout.endswith("all is well\n")


CHECKS = """
print("code of", Path(rayembed.__file__).parents[2])
folder = Path(sys.argv[1])
backbone = save_encoder(folder / "encoder")
config = LayerMixConfig(backbone=BackboneConfig(path=str(backbone), dtype="float32"))
config = config.model_copy(update={"query_max_length": 24, "document_max_length": 24})
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

# Saved, read back by us and by sentence-transformers: the same vectors.
model.eval().save(folder / "saved")
assert isinstance(check_loadable(folder / "saved"), LayerMixConfig)
expected = encode(model, LINES, role="query")
assert abs(encode(load_model(folder / "saved"), LINES, role="query") - expected).max() < 1e-6
theirs = as_sentence_transformer(folder / "saved", device="cpu").encode_query(LINES)
assert abs(theirs - expected).max() < 1e-5
again = build_model(config, folder / "saved", seed=9).weights.logits
assert torch.equal(again, model.weights.logits), "a further stage starts from the trained head"

# The recipe: its size, its dry run, its card.
run = get_recipe("layer-mix-quickstart")
assert model_size(run.model).trainable - model_size(get_recipe("biencoder").model).trainable == 7
assert training_job("biencoder")(["--recipe", run.name, "--dry-run"]) == 0
card = model_card(
    run, dimensions=384, scores="", provenance={}, registered_model=run.name, results=()
)
assert "learnt mean over all layers" in card
print("all is well")
"""
