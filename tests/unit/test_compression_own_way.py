"""The way of docs/own_compression.md, in a copy of the code and as a package of its own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own_package import own_package
from tiny_folders import save_biencoder

import rayembed
from rayembed_extras.compression.settings import COMPRESSIONS

PLATFORM = Path(rayembed.__file__).parents[1]
PAGE = (PLATFORM.parent / "docs" / "own_compression.md").read_text()
SCRIPT = """
import sys
from pathlib import Path
from rayembed_extras.compression.job import run_compression_job
argv = ["--model", sys.argv[1], "--way", "rounded,step=0.25", "--tasks", "STSBenchmark"]
(way,) = run_compression_job.resolve(argv)[0].ways
from rayembed.models.loading.load import load_model
from rayembed_extras.compression.contract import CompressionSource
made = way.compress(CompressionSource(Path(sys.argv[1])), Path(sys.argv[2]))
weights = [parameter for parameter in load_model(sys.argv[2]).parameters()]
assert all((weight * 4 == (weight * 4).round()).all() for weight in weights)
assert made.weights == made.compressed == sum(weight.numel() for weight in weights)
print(way.label)
"""


def in_the_house(folder):
    shutil.copytree(PLATFORM, folder / "platform", ignore=shutil.ignore_patterns("__pycache__"))
    (text,) = re.findall(r"^```python\n# my_package/rounded.py\n(.*?)^```", PAGE, re.M | re.S)
    flat = folder / "platform/rayembed_extras/compression"
    (flat / "rounded.py").write_text(text)
    table = (flat / "settings.py").read_text()
    line = '        "rayembed_extras.compression.layers:Layers",\n'
    assert line in table
    added = line + line.replace("layers:Layers", "rounded:Rounded")
    (flat / "settings.py").write_text(table.replace(line, added))
    return {"PYTHONPATH": str(folder / "platform")}


def in_a_package(folder):
    return own_package(PAGE, folder)


def test_without_the_page_there_is_no_such_way():
    assert "rounded" not in COMPRESSIONS.classes()


@pytest.mark.parametrize("added", [in_the_house, in_a_package])
def test_the_way_of_the_page_makes_a_variant(added, tmp_path):
    environment = added(tmp_path)
    model, output = save_biencoder(tmp_path / "model"), tmp_path / "rounded"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(output)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "rounded"
    assert json.loads((output / "compression.json").read_text())["settings"]["kind"] == "rounded"
