"""docs/own_loss.md, applied to a copy of the code and as a package of its own: the loss trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import prepared
import pytest

import rayembed
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError

PLATFORM = Path(rayembed.__file__).parents[1]
TESTS = Path(__file__).resolve().parents[1]
PAGE = (PLATFORM.parent / "docs" / "own_loss.md").read_text()
STAGE = {
    "name": "s",
    "datasets": {"d": 1},
    "batch": {"global_pairs": 24, "num_negatives": 2, "in_batch_negatives": True},
    "loss": {"kind": "additive_margin", "dimensions": [4]},
    "optimizer": {"learning_rate": 0.02, "loss_learning_rate": 0.1},
    "steps": 10,
}


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def run(command, *path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the code with the page's file and line."""
    root = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns("*.egg-info")
    shutil.copytree(PLATFORM, root / "platform", ignore=leave)
    name, _, text = block("python").removeprefix("# ").partition("\n")
    (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    command = ["git", "-C", str(root), "apply", "-C1", "-"]
    changes = block("diff")
    assert changes.count("\n+ ") == 1, "one line of one table"
    done = subprocess.run(command, input=changes, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root / "platform"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A package that brings the page's file by the page's entry point."""
    site = tmp_path_factory.mktemp("site")
    (site / "my_package").mkdir()
    (site / "my_package" / "__init__.py").write_text("")
    (site / "my_package" / "additive_margin.py").write_text(block("python"))
    info = site / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    group, _, line = block("toml").partition("\n")
    name = group.removeprefix("[project.entry-points.").strip('"]').strip('"')
    (info / "entry_points.txt").write_text(f"[{name}]\n{line.replace(chr(34), '')}")
    return site


def test_without_the_page_the_kind_is_refused():
    with pytest.raises(ConfigError, match="'additive_margin': must be one of"):
        parse(StageConfig, STAGE)


TRAINS = f"""
import sys, math
from rayembed.config.stage import StageConfig
from rayembed.config.settings import parse
stage = parse(StageConfig, {STAGE!r})
assert "torch" not in sys.modules
import torch
from made_up_records import made_up_records
from toy_model import ToyModel
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.objective import StepSettings
from rayembed.training.contrastive.step import run_step

model = ToyModel()
module = EngineModule(model, stage.loss)
optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
batch = make_step_batch(0, made_up_records(24), 2, model.tokenizer)
settings = StepSettings(40, True, torch.device("cpu"))
reports = []
for _ in range(10):
    optimizer.zero_grad()
    reports.append(
        run_step(model, module, lambda loss, _: loss.backward(), batch, stage, settings)
    )
    optimizer.step()
assert reports[-1].loss < 0.9 * reports[0].loss, [report.loss for report in reports]
scales = [report.metrics["loss_log_scale"] for report in reports]
assert abs(scales[0] - math.log(14.3)) < 1e-5
assert abs(scales[-1] - scales[0]) > 0.05
print(type(stage.loss).__module__)
"""


def test_the_loss_of_the_page_trains(copied):
    found = run([sys.executable, "-c", TRAINS], copied, TESTS / "support")
    assert found == "rayembed.losses.additive_margin\n"


def test_it_trains_from_a_package_of_its_own(installed):
    found = run([sys.executable, "-c", TRAINS], installed, PLATFORM, TESTS / "support")
    assert found == "my_package.additive_margin\n"


def test_it_is_of_the_tables_contract(copied):
    command = [sys.executable, "-m", "pytest", str(TESTS / "unit" / "test_losses_table.py")]
    command += ["-q", "-k", "additive_margin", "-p", "no:cacheprovider"]
    done = prepared.run(command, env={**os.environ, "PYTHONPATH": str(copied)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_command_of_the_page_is_one(copied):
    command = block("bash").replace("\\\n", " ").split()
    assert command[:2] == ["python", "jobs/train_biencoder.py"]
    script = PLATFORM.parent / command[1]
    printed = run([sys.executable, str(script), *command[2:]], copied)
    assert "kind: additive_margin" in printed
    assert "loss_learning_rate: 0.001" in printed
