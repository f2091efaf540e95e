"""docs/own_job.md, applied to a copy of the code and as a package of its own: the job runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rayembed
from rayembed.errors import ConfigError
from rayembed.jobs.table import JOBS

PLATFORM = Path(rayembed.__file__).parents[1]
PAGE = (PLATFORM.parent / "docs" / "own_job.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def block(language):
    return blocks(language)[0]


def in_the_house(folder):
    """A copy of the code with the page's file and line."""
    leave = shutil.ignore_patterns("*.egg-info")
    shutil.copytree(PLATFORM, folder / "platform", ignore=leave)
    name, _, text = block("python").removeprefix("# ").partition("\n")
    (folder / name).write_text(text)
    changes = block("diff")
    assert changes.count("\n+ ") == 1, "one line of one table"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    command = ["git", "-C", str(folder), "apply", "-C1", "-"]
    done = subprocess.run(command, input=changes, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [folder / "platform"]


def in_a_package(folder):
    """A package that brings the page's files by the page's entry point."""
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text("")
    for file in blocks("python"):
        name, _, text = file.removeprefix("# ").partition("\n")
        (folder / "my_package" / Path(name).name).write_text(text)
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    points = block("toml").replace('[project.entry-points."', "[").replace('"]', "]")
    (info / "entry_points.txt").write_text(points.replace('"', ""))
    return [folder, PLATFORM]


def test_without_the_page_there_is_no_such_job():
    with pytest.raises(ConfigError, match="no job 'lengths'"):
        JOBS.get("lengths")


@pytest.mark.parametrize("added", [in_the_house, in_a_package])
def test_the_job_of_the_page_runs(added, tmp_path):
    paths = added(tmp_path)
    rows = '{"query": "a b", "positive": "c d e"}\n{"query": "a", "positive": "c"}\n'
    (tmp_path / "pairs.jsonl").write_text(rows)

    def run(*argv, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "rayembed", *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    command = block("bash").split()
    assert command[0] == "rayembed"
    told = run(*command[1:]).stdout
    assert told == "query: 1.5 words of 2 rows\npositive: 2.0 words of 2 rows\n"
    assert re.search(r"^data:\n(  .*\n)*  lengths +Measure", run("--help").stdout, re.MULTILINE)
    shown = run("lengths", "--dry-run")
    assert (shown.stdout, shown.stderr) == ("pairs.jsonl\n", f"{len(rows)} bytes\n")
    assert "usage: python -m rayembed lengths" in run("lengths", "--help").stdout
    refused = run("lengths", "--pairs", "none.jsonl", code=2).stderr
    assert refused.startswith("error: --pairs: there is no file 'none.jsonl'")
