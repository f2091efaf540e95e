"""Optional features and the papers can be taken away: the core stands without them."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parts import FLATS, ROOT, copy_of_the_core, part_of

import rayembed
from rayembed.config.table import COMPANIONS

PLATFORM = Path(rayembed.__file__).parents[1]
TESTS = ROOT / "tests"

NEEDS = {"rayembed_papers": "consistency"}
"""Packages without which others are no use: a paper's mixture is filtered."""

STANDS = """
import importlib, json, pkgutil, sys
here = sys.argv[1]
sys.path[:] = [here, *(p for p in sys.path if not p.endswith("/platform"))]
import rayembed
assert rayembed.__file__.startswith(here)
from rayembed.jobs.table import JOBS
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.recipes.data_recipes import data_recipe_names, get_data_recipe
from rayembed.config.data_steps import CLEANERS, STEPS
from rayembed.config.named_benchmarks import job_benchmark_names
from rayembed.config.sources import SOURCES
recipes = [get_recipe(name).name for name in recipe_names()]
recipes += [get_data_recipe(name).name for name in data_recipe_names()]
if sys.argv[2:]:
    for module in pkgutil.walk_packages(rayembed.__path__, "rayembed."):
        if not module.name.endswith(("__main__", "_kernels")):  # for GPUs alone
            importlib.import_module(module.name)
found = {"jobs": list(JOBS.members()), "benchmarks": list(job_benchmark_names())}
found |= {"data steps": list(STEPS.classes()), "cleaners": list(CLEANERS.classes())}
found |= {"sources": list(SOURCES.classes()), "recipes": recipes}
print(json.dumps(found))
"""


WITHOUT_THE_SAMPLE = """
import sys
from pathlib import Path
here = sys.argv[1]
sys.path[:] = [here, *(p for p in sys.path if not p.endswith("/platform"))]
from rayembed.assets.reading import open_source
from rayembed.assets.resolver import resolve
from rayembed.config.named_benchmarks import with_own_sets
from rayembed.config.override import override
from rayembed.errors import RayembedError
from rayembed.recipes.catalogue import get_recipe
quickstart, own = get_recipe("biencoder-quickstart"), get_recipe("biencoder")
path = quickstart.data.datasets[0].source.path
for act in (resolve, open_source):
    try:
        act(path)
    except RayembedError as error:
        print(error)
assert (own.evaluation.benchmarks, own.evaluation.guard is None) == ((), False)
assert with_own_sets(own.evaluation) == own.evaluation
try:
    with_own_sets(override(own, ["evaluation.benchmarks=[wikipedia]"]).evaluation)
except RayembedError as error:
    print(error)
"""


def copy_without(folder, *paths):
    """The code without some folders."""
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(PLATFORM, folder / "platform", ignore=leave)
    for path in paths:
        shutil.rmtree(folder / "platform" / path)
    return folder / "platform"


def stands(platform, *everything):
    """What there is in a copy of the code, in a process that finds no other one."""
    command = [sys.executable, "-c", STANDS, str(platform), *everything]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "left out" not in done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def whole():
    return stands(PLATFORM)


def test_the_core_alone_imports_lists_its_jobs_and_resolves_its_recipes(tmp_path, whole):
    alone = stands(copy_without(tmp_path, *COMPANIONS), "every module")
    assert {"biencoder", "nvembed-quickstart", "pairs"} <= {*alone["recipes"]}
    assert {*alone["recipes"]} < {*whole["recipes"]}
    assert len(whole["recipes"]) == 37 + 7, "runs, and recipes of data"
    assert len(alone["jobs"]) < len(whole["jobs"])
    assert {"train", "prepare", "mine", "evaluate", "register"} <= {*alone["jobs"]}
    assert alone["benchmarks"] == []
    assert (alone["data steps"], alone["cleaners"]) == (["mining", "clusters"], [])
    assert {*whole["data steps"]} > {"consistency", "mining"}
    assert whole["cleaners"] == ["near_duplicates"]
    assert set(whole["sources"]) - set(alone["sources"]) == {"mteb", "queries"}


@pytest.mark.parametrize("flat", FLATS)
def test_without_a_flat_the_others_are_there(flat, tmp_path, whole):
    gone = [f"rayembed_extras/{flat}", *(folder for folder in NEEDS if NEEDS[folder] == flat)]
    found = stands(copy_without(tmp_path, *gone))
    own = set().union(*(entry_points_of(PLATFORM / folder) for folder in gone))
    for kind in ("recipes", "jobs", "benchmarks", "data steps", "cleaners"):
        assert set(whole[kind]) - set(found[kind]) == own & set(whole[kind]), kind


def test_without_the_sample_errors_name_what_brings_it(tmp_path):
    platform = copy_without(tmp_path, "rayembed_extras/wikipedia_sample")
    command = [sys.executable, "-c", WITHOUT_THE_SAMPLE, str(platform)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    files, read, benchmark = done.stdout.splitlines()
    assert files == read
    assert "needs rayembed_extras.wikipedia_sample, which is not installed" in files
    assert "'wikipedia', which the package rayembed_extras.wikipedia_sample" in benchmark


def entry_points_of(flat):
    """Names of the entry points of a flat."""
    lines = [
        line for file in flat.glob("**/entry_points.txt") for line in file.read_text().splitlines()
    ]
    return {line.partition("=")[0].strip() for line in lines if "=" in line}


def imported_of(path):
    """Names of what a file imports: of a test or its helper within functions as well, of a
    benchmark what it imports at once.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if TESTS in path.parents else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))


def reached_of(path):
    """Modules that a file of tests imports, by itself, by its helpers and by benchmarks."""
    waiting, seen = [path], set()
    while waiting:
        for name in {*imported_of(waiting.pop())} - seen:
            places = [TESTS / folder / f"{name}.py" for folder in ("support", "drill")]
            places.append(ROOT / f"{name.replace('.', '/')}.py")
            waiting += [place for place in places if place.is_file()]
            seen.add(name)
    return {name for name in seen if name.startswith(tuple(f"{one}." for one in COMPANIONS))}


def test_tests_of_the_core_import_the_core_alone():
    files = {path: part_of(path.name) for path in TESTS.rglob("test_*.py")}
    assert {"core", "house", "papers", *FLATS} == {*files.values()}
    found = {
        str(path.relative_to(TESTS)): names
        for path, part in files.items()
        if part == "core" and (names := reached_of(path))
    }
    assert found == {}, "name the file after the feature, or leave the feature out of it"
    assert any(reached_of(path) for path, part in files.items() if part == "sweeps"), "the control"


LEANING = [
    f"tests/unit/test_{name}.py"
    for name in (
        *("config_command_line", "data_prepare", "evaluation_guard", "evaluation_scores"),
        *("pipeline_checks", "recipes"),
    )
]
"""Fast files of the core with recipes, jobs, held-out articles and tables of all kinds."""


def test_tests_of_the_core_pass_where_nothing_else_is(tmp_path):
    """Some of them; `make core` runs all."""
    copy = copy_of_the_core(tmp_path / "copy")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LEANING],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "platform")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "part core: " in done.stdout
