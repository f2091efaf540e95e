"""The command `rayembed`: its list, names, shells and jobs, also from a wheel alone."""

import os
import resource
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from unittest.mock import patch

import pytest
from own_pairs import write_pairs

from rayembed.config.table import NamedTable, load
from rayembed.errors import ConfigError
from rayembed.jobs.command_line import main
from rayembed.jobs.table import DATA, EVALUATE, JOBS, SERVE, TRAIN, Command
from rayembed.pipeline.job import Job
from rayembed.pipeline.run.training_job import run_training_job, training_job
from rayembed.recipes.catalogue import get_recipe, recipe_names

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "jobs").rglob("*.py"))


def test_the_list_is_grouped_short_and_fast():
    code = "from rayembed.jobs.command_line import main; import sys; code = main(['--help'])\n"
    code += "heavy = {'torch', 'ray', 'numpy', 'rayembed.pipeline.job'} & set(sys.modules)\n"
    code += "sys.exit(code or repr(heavy)) if code or heavy else None"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    lines = done.stdout.splitlines()
    heads = [line.rstrip(":") for line in lines if line.endswith(":")]
    assert heads[:4] == [TRAIN, DATA, EVALUATE, SERVE]
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    groups = {name: each.group for name, each in JOBS.members().items()}
    # Jobs of optional features stand among those of the core.
    assert listed == sorted(groups, key=lambda name: (heads.index(groups[name]), name))
    assert max(map(len, lines)) <= 100


def test_loading_a_job_for_its_help_or_its_errors_loads_neither_torch_nor_mteb_nor_ray():
    code = (
        "import sys; from rayembed.jobs.table import JOBS; from rayembed.config.table import load\n"
    )
    code += "for name, command in JOBS.members().items():\n    load(command.job)\n"
    code += "    heavy = {'torch', 'mteb', 'ray', 'transformers'} & set(sys.modules)\n"
    code += "    assert not heavy, (name, heavy)\n"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_script_starts_a_job_of_the_command():
    """But those that train one architecture alone."""
    started = []
    for path in SCRIPTS:
        with (
            patch.object(Command, "__call__", lambda it, argv, prog=None: started.append(it) or 0),
            patch.object(Job, "__call__", lambda it, argv, about=None, prog=None: 0),
            patch.object(sys, "argv", [str(path)]),
            pytest.raises(SystemExit),
        ):
            runpy.run_path(str(path), run_name="__main__")
    rerankers = "train_reranker"  # has a job of its own
    others = [path for path in SCRIPTS if path.stem.startswith("train_")]
    others = [path for path in others if path.stem != rerankers]
    assert len(started) == len(SCRIPTS) - len(others)
    alone = {name for name, command in JOBS.members().items() if command not in started}
    assert alone <= {"train", "completion"}


@pytest.mark.parametrize("name", JOBS.members())
def test_the_usage_of_each_job_says_how_it_was_called(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rayembed", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rayembed {name} ")
    assert callable(load(JOBS.get(name).job))


def test_wrong_names_are_told(capsys):
    assert main(["evaluat"]) == 2
    assert capsys.readouterr().err == "error: no job 'evaluat'; did you mean 'evaluate'?\n"
    assert main([]) == 2
    shown = capsys.readouterr()
    assert "  train " in shown.err
    assert shown.out == ""
    assert main(["https://me:hunter2@host/", "--x=1"]) == 2
    assert "hunter2" not in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rayembed ")


@pytest.mark.parametrize("recipe", recipe_names())
def test_train_takes_every_recipe(recipe):
    assert (
        run_training_job.resolve(["--recipe", recipe])[0] == (training_job(recipe).resolve([])[0])
    )
    assert run_training_job.resolve(["--recipe", recipe])[0].model == get_recipe(recipe).model


def test_train_on_a_file_of_pairs_is_the_recipe_for_own_pairs(tmp_path, monkeypatch, capsys):
    write_pairs(tmp_path / "pairs.jsonl")
    monkeypatch.chdir(tmp_path)
    path = f"data.datasets.pairs.source.path={tmp_path}/pairs.jsonl"
    for recipe in ("biencoder", "cde"):
        named = [] if recipe == "biencoder" else ["--recipe", recipe]
        run, _ = run_training_job.resolve(["--pairs", "pairs.jsonl", *named, "--name", "own"])
        typed = ["--recipe", recipe, "--set", path, "--name", "own"]
        assert run == training_job(recipe).resolve(typed)[0]
        assert run.name == "own"
        other = "nvembed-quickstart"
        assert run_training_job.resolve(["--recipe", other])[0] == get_recipe(other)
    assert main(["train", "--pairs", "absent.jsonl", "--dry-run"]) == 2
    assert f"{tmp_path}/absent.jsonl" in capsys.readouterr().err
    assert main(["train", "--dry-run"]) == 2
    assert "--recipe NAME (--list prints all)" in capsys.readouterr().err
    assert main(["train", "--pairs", "pairs.jsonl", "--recipe", "nvembed-quickstart"]) == 2
    assert "pairs" in capsys.readouterr().err


def test_train_lists_the_recipes_of_all_architectures(capsys):
    assert main(["train", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in recipe_names())


def _orchard(folder, monkeypatch, points):
    info = folder / "orchard-1.0.dist-info"
    info.mkdir()
    row = 'PICK = Command(GROUP, "Pick.", "orchard:pick")'
    lines = ["from rayembed.jobs.table import Command", 'GROUP = "data"', row]
    (folder / "orchard.py").write_text("\n".join(lines))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: orchard\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[test.jobs]\n{points}\n")
    monkeypatch.syspath_prepend(str(folder))
    return NamedTable("test.jobs", Command, "job", {"train": JOBS.get("train")})


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("pick = no_such_module:PICK", "cannot be imported"),
        ("train = orchard:PICK", "has the name 'train', which another member has"),
        ("pick = orchard:GROUP", "is no rayembed.jobs.table.Command"),
    ],
)
def test_a_broken_job_of_another_package_is_left_out(point, words, tmp_path, monkeypatch, caplog):
    table = _orchard(tmp_path, monkeypatch, f"apple = orchard:PICK\n{point}")
    assert list(table.members()) == ["train", "apple"]
    assert words in caplog.text
    assert "package orchard" in caplog.text
    caplog.clear()
    assert table.get("train") is JOBS.get("train")
    assert caplog.text == "", "a job of this package asks no other one"
    with pytest.raises(ConfigError, match="no job 'appl'; did you mean 'apple'"):
        table.get("appl")


def test_a_wheel_alone_has_the_command(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    leave = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "platform", source / "platform", ignore=leave)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", *alone, "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    install = [*pip, "install", *alone, "--no-compile", "--target", str(site), str(built)]
    subprocess.run(install, check=True, capture_output=True)
    write_pairs(tmp_path / "pairs.jsonl")

    def run(*argv):
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths = [str(site), *(path for path in others if not path.startswith(str(ROOT)))]
        done = subprocess.run(
            [site / "bin" / "rayembed", *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    points = entry_points(group="rayembed.jobs")
    listed = run("--help")
    assert all(f"  {point.name} " in listed for point in points)
    shown = run("train", "--pairs", "pairs.jsonl", "--dry-run")
    assert f"path: {tmp_path}/pairs.jsonl" in shown
    assert run("train", "--recipe", "cde-quickstart", "--dry-run").startswith(
        "# run cde-quickstart"
    )
