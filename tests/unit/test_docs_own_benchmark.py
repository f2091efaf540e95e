"""The benchmark of docs/own_benchmark.md, in a copy of the code and as a package of its own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own_package import own_package

import rayembed
from rayembed.config.named_benchmarks import further_benchmark_names

PLATFORM = Path(rayembed.__file__).parents[1]
PAGE = (PLATFORM.parent / "docs" / "own_benchmark.md").read_text()
SCRIPT = """
import json, sys
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.named_benchmarks import further_benchmark_names, with_own_sets
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.recipes.catalogue import get_recipe
assert not {"torch", "ray", "mteb"} & set(sys.modules)
asked = {"model": {"reference": "m"}, "benchmarks": ["tickets?year=2025"]}
sets = [with_own_sets(parse(EvaluationRun, asked)).own_sets]
run = override(get_recipe("biencoder"), ["evaluation.benchmarks=[tickets]"])
sets.append(with_own_sets(run.evaluation).own_sets)
print(json.dumps(["tickets" in further_benchmark_names(), [[s.path for s in o] for o in sets]]))
"""


def in_the_house(folder):
    shutil.copytree(PLATFORM, folder / "platform", ignore=shutil.ignore_patterns("__pycache__"))
    (text,) = re.findall(r"^```python\n# my_package/tickets.py\n(.*?)^```", PAGE, re.M | re.S)
    flat = folder / "platform/rayembed_extras/tickets"
    flat.mkdir()
    (flat / "__init__.py").write_text(text)
    point = "tickets = rayembed_extras.tickets:BENCHMARK"
    (flat / "entry_points.txt").write_text(f"[rayembed.benchmarks]\n{point}\n")
    return {"PYTHONPATH": str(folder / "platform")}


def in_a_package(folder):
    return own_package(PAGE, folder)


def test_without_the_page_there_is_no_such_benchmark():
    assert "tickets" not in further_benchmark_names()


@pytest.mark.parametrize("added", [in_the_house, in_a_package])
def test_the_benchmark_of_the_page_stands_for_its_sets(added, tmp_path):
    environment = added(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    paths = [["s3://support/tickets/2025"], ["s3://support/tickets/2026"]]
    assert json.loads(done.stdout) == [True, paths]
