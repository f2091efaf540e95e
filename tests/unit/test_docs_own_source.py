"""docs/own_source.md, applied to a copy of the code and installed as a package of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rayembed
from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe

PLATFORM = Path(rayembed.__file__).parents[1]
PAGE = (PLATFORM.parent / "docs" / "own_source.md").read_text()

SETTINGS = [
    "data.datasets.pairs.source={kind: turns, path: chats.jsonl, max_rejected_share: 0.5}",
    "data.datasets.pairs.held_out=null",
    "evaluation.guard=null",
    "data.datasets.pairs.mining={teacher: one, rule: {kind: half_way, unrelated: 0.25}}",
    "stages.finetune.batch.num_negatives=7",
]

SCRIPT = f"""
import pickle, sys
from rayembed.config.override import override
from rayembed.recipes.catalogue import get_recipe
assert not {{"torch", "ray", "numpy", "pyarrow"}} & set(sys.modules)
run = override(get_recipe("biencoder"), {SETTINGS!r})
import numpy as np
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut
(dataset,) = pickle.loads(pickle.dumps(run.data.datasets))
made = make_records(PipelineContext("out", 0), check_source(dataset, "."), HeldOut())
for part in made.parts:
    for record in read_records(part.path):
        print(record.query, *record.positives, *record.origin)
print(made.manifest["rejected"], dataset.mining.rule.highest_scores(np.array([0.75, 0.25])))
"""

CHATS = [
    [("user", "q 1"), ("assistant", "a 1"), ("user", "q 2"), ("assistant", "a 2")],
    [("system", "s"), ("user", "q 3"), ("assistant", "a 3"), ("user", "thanks")],
    [("user", "nobody answers")],
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def in_the_house(folder: Path) -> list[Path]:
    """A copy of the code with the page's files and lines."""
    leave = shutil.ignore_patterns("*.egg-info")
    shutil.copytree(PLATFORM, folder / "platform", ignore=leave)
    for file in blocks("python"):
        name, _, text = file.removeprefix("# ").partition("\n")
        (folder / name).write_text(text)
    changes = "".join(blocks("diff"))
    added = [line for line in changes.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    assert len(added) == 2, "one line for each"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    command = ["git", "-C", str(folder), "apply", "-C1", "-"]
    done = subprocess.run(command, input=changes, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [folder / "platform"]


def in_a_package(folder: Path) -> list[Path]:
    """The page's files as a package beside the code, with its entry points."""
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text("")
    for file in blocks("python"):
        name, _, text = file.removeprefix("# ").partition("\n")
        (folder / "my_package" / Path(name).name).write_text(text)
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (points,) = blocks("toml")
    points = points.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (info / "entry_points.txt").write_text(points)
    return [folder, PLATFORM]


def test_without_the_page_the_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="'turns': must be one of"):
        override(get_recipe("biencoder"), SETTINGS[:1])
    with pytest.raises(ConfigError, match="'half_way': must be one of"):
        override(get_recipe("biencoder"), SETTINGS[3:])


@pytest.mark.parametrize("added", [in_the_house, in_a_package])
def test_rows_of_the_pages_source_become_records(added, tmp_path: Path) -> None:
    paths = added(tmp_path)
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS
    ]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    second = len(json.dumps(rows[0])) + 1
    assert done.stdout.splitlines() == [
        "q 1 a 1 chats.jsonl@0",
        "q 2 a 2 chats.jsonl@0",
        f"q 3 a 3 chats.jsonl@{second}",
        "{'no question is answered': 1} [0.5  0.25]",
    ]
