"""What a model was trained on, in the metadata that go with its results to mteb."""

import json
import subprocess
from dataclasses import replace

import mteb
from made_results import write_result
from tiny_folders import save_biencoder

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.types import SHORT_NAMES
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.run_scores import make_spec
from rayembed.evaluation.training_data import (
    UNKNOWN,
    TrainingData,
    name_on_hub,
    training_data,
    training_data_of,
)
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.card_parts import front_matter

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def test_a_package_that_holds_a_model_of_the_hub_has_its_name():
    assert name_on_hub(SHORT_NAMES["all-MiniLM-L6-v2"]) == MINILM
    assert name_on_hub(f"hf://{MINILM}@main") == MINILM
    assert name_on_hub("/models/all-MiniLM-L6-v2") is None


def run_on(path):
    run = get_recipe("biencoder")
    (pairs,) = run.data.datasets
    source = pairs.source.model_copy(update={"path": path})
    data = run.data.model_copy(update={"datasets": (pairs.model_copy(update={"source": source}),)})
    return run.model_copy(update={"data": data})


def test_data_sets_of_the_hub_are_named_by_the_tasks_that_read_them():
    run = run_on("hf://datasets/mteb/scifact@main/train.jsonl")
    trained = training_data_of(run, is_trained=True)
    assert "SciFact" in trained.tasks
    assert trained.base == MINILM
    assert training_data_of(run, is_trained=False) == TrainingData((), MINILM)
    assert training_data_of(run_on("pairs.jsonl"), is_trained=True).tasks == ()


def test_a_model_that_mteb_knows_has_its_declared_data(tmp_path):
    known = training_data(f"hf://{MINILM}@main", tmp_path)
    assert {"NQ", "MSMARCO"} <= {*known.tasks}
    assert training_data("hf://nobody/nothing@main", tmp_path).tasks is None
    assert training_data(str(tmp_path), tmp_path) == UNKNOWN


def test_the_card_of_a_saved_model_says_what_it_was_trained_on(tmp_path):
    card = front_matter(
        "m", base_model=MINILM, licence="mit", datasets=["mteb/scifact"], results=()
    )
    (tmp_path / "README.md").write_text(f"{card}\n\n# m\n")
    found = training_data(str(tmp_path), tmp_path)
    assert found.base == MINILM
    assert "SciFact" in found.tasks
    other = card.replace("- rayembed\n", "")
    (tmp_path / "README.md").write_text(f"{other}\n\n# m\n")
    assert training_data(str(tmp_path), tmp_path) == UNKNOWN, "the card of another tool"


def test_metadata_of_results_declare_it(tmp_path):
    save_biencoder(tmp_path / "model")
    settings = ModelUnderTest(reference=str(tmp_path / "model"), name="m", dtype="float32")
    spec = make_spec(settings, on="cpu")
    assert spec.meta.training_datasets is None
    told = replace(spec, training=TrainingData(("SciFact",), MINILM))
    assert {"SciFact", "NQ"} <= told.meta.get_training_datasets()
    assert told.meta.is_zero_shot_on(["SciFact"]) is False
    assert told.meta.is_zero_shot_on(["ArguAna"]) is True
    assert told.meta.revision == spec.meta.revision, "it decides no score"


def git(folder, *words):
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_submission_of_mteb_takes_the_results_with_what_they_declare(tmp_path, monkeypatch):
    meta = model_meta("m", "r", training_datasets={"SciFact"}, adapted_from=MINILM)
    place = write_result(tmp_path, "rayembed/m", "r", "ArguAna", {("test", "default"): 0.5})
    (place.parent / "model_meta.json").write_text(json.dumps(meta.to_dict()))
    (place.parent / "clean_scores.csv").write_text("task\n")
    cache = mteb.ResultCache(tmp_path)
    repository = cache.remote_repo_path
    (repository / "results").mkdir(parents=True)
    git(repository, "init", "-b", "main")
    git(repository, "config", "user.name", "t")
    git(repository, "config", "user.email", "t@t")
    git(repository, "commit", "--allow-empty", "-m", "first")
    monkeypatch.setattr(type(cache), "download_from_remote", lambda self, **_: repository)
    response = cache.submit_results()
    assert (response["status"], response["result_count"]) == ("ready_for_submission", 1)
    sent = git(repository, "show", "--name-only", "--format=").split()
    assert sorted(name.rpartition("/")[2] for name in sent) == ["ArguAna.json", "model_meta.json"]
    stored = json.loads((repository / next(n for n in sent if "meta" in n)).read_text())
    assert stored["training_datasets"] == ["SciFact"]
    assert stored["adapted_from"] == MINILM
