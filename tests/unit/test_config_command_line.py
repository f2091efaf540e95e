"""From arguments to a run, and what the user sees when they are wrong."""

import sys
import types
from pathlib import Path

import pytest
from own_pairs import write_pairs

import rayembed
from rayembed.errors import ConfigError, PlacementError
from rayembed.pipeline.job import RUN, work_begins
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import SCRIPTS, get_recipe, recipe_names

ROOT = Path(rayembed.__file__).parents[2]


def job(*argv: str) -> int:
    return training_job("biencoder")(argv, about="About.")


def test_without_arguments_the_default_recipe_is_trained():
    run, action = training_job("nvembed-quickstart").resolve([])
    assert run == get_recipe("nvembed-quickstart")
    assert action == RUN


def test_recipe_settings_and_name_come_in_this_order():
    recipe = "nvembed-quickstart"
    argv = f"--name mine --set seed=1 --set name=other --recipe {recipe} --set seed=2 --dry-run"
    run, action = training_job(recipe).resolve(argv.split())
    assert (run.name, run.seed, action) == ("mine", 2, "--dry-run")
    assert run.fingerprint != get_recipe(recipe).fingerprint
    assert run.model == get_recipe(recipe).model


def test_a_file_stands_for_a_recipe(tmp_path, monkeypatch):
    expected, _ = training_job("nvembed-quickstart").resolve(["--set", "seed=5"])
    file = tmp_path / "run.yaml"
    file.write_text(expected.to_yaml())
    assert training_job("nvembed-quickstart").resolve(["--recipe", str(file)])[0] == expected
    monkeypatch.chdir(tmp_path)
    assert training_job("nvembed-quickstart").resolve(["--recipe", "run.yaml"])[0] == expected
    file.rename("run")  # any name that is a file and no recipe
    assert training_job("nvembed-quickstart").resolve(["--recipe", "run"])[0] == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--recipe", "nvembed-quickstar"],
            "error: no recipe 'nvembed-quickstar'; did you mean 'nvembed-quickstart'?\n",
        ),
        (["--recipe", "none.yaml"], "error: cannot read the settings file 'none.yaml'"),
        (["--set", "sead=1"], "error: no setting 'sead'; did you mean 'seed'?\n"),
        (["--set", "seed"], "error: --set 'seed': expected path.to.setting=value\n"),
        (["--set", "placement.workers=7"], "cannot be shared equally"),
        (["--name", "a b"], "error: name = 'a b'"),
        (["--dry-run", "--set", "model.backbone.path=nowhere"], "error: model.backbone.path"),
        (["--dry-run", "--set", "evaluation.benchmarks=[NanoBIER]"], "did you mean 'NanoBEIR'?"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(argv, message, capsys):
    assert job(*argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_unknown_options_and_abbreviations_are_refused(capsys):
    for argv in (["--recip", "biencoder"], ["--steps", "3"]):
        with pytest.raises(SystemExit) as exit_:
            training_job("biencoder").resolve(argv)
        assert exit_.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


RECIPES = ("nvembed-quickstart", "causal2vec-quickstart", "cde", "nomic-quickstart", "biencoder")
"""One of each architecture."""


def test_the_lists_of_all_jobs_show_every_recipe_once(capsys):
    lists = {}
    for recipe in RECIPES:
        assert training_job(recipe)(["--list"]) == 0
        lists[recipe] = capsys.readouterr().out
    embedding = [name for name in recipe_names() if get_recipe(name).model.embeds]
    assert {*recipe_names()} - {*embedding} <= {"reranker"}, "whose job has it alone"
    for name in embedding:
        (listing,) = [recipe for recipe, shown in lists.items() if f" {name} " in shown]
        assert get_recipe(listing).model.kind == get_recipe(name).model.kind


@pytest.mark.parametrize("as_file", [False, True])
def test_a_recipe_of_another_architecture_is_refused_with_its_job(as_file, tmp_path, capsys):
    recipe = "nomic-quickstart"
    if as_file:
        recipe = str(tmp_path / "run.yaml")
        (tmp_path / "run.yaml").write_text(get_recipe("nomic-quickstart").to_yaml())
    assert job("--recipe", recipe, "--dry-run") == 2
    assert "start it with jobs/train_nomic.py" in capsys.readouterr().err
    assert all((ROOT / "jobs" / f"{script}.py").is_file() for script in SCRIPTS.values())


def test_training_gets_the_run_and_its_errors_are_messages(monkeypatch, capsys, tmp_path):
    trained = []
    fake = types.ModuleType("rayembed.pipeline.run.train")
    fake.train = trained.append
    monkeypatch.setitem(sys.modules, "rayembed.pipeline.run.train", fake)
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl")
    assert job("--name", "mine") == 0
    assert [run.name for run in trained] == ["mine"]

    def refuse(run):
        raise PlacementError("more workers than CPUs")

    fake.train = refuse
    assert job() == 1
    assert capsys.readouterr().err == "error: more workers than CPUs\n"

    def begin_and_refuse(run):
        work_begins()
        raise ConfigError("a setting that only the cluster could tell")

    fake.train = begin_and_refuse
    assert job() == 1, "2 says that nothing was started"
    capsys.readouterr()

    def refuse_first(run):
        raise ConfigError("a setting that the model tells")

    fake.train = refuse_first
    assert job() == 2

    def break_down(run):
        raise ZeroDivisionError

    fake.train = break_down
    with pytest.raises(ZeroDivisionError):  # a defect of ours keeps its traceback
        job()
