"""The merge job on saved folders and checkpoints, and what it refuses."""

import json
import shutil

import pytest
import torch
from own_pairs import own_run, write_pairs
from tiny_job import run_here
from tiny_models import save_encoder

import rayembed
from rayembed.config.types import SHORT_NAMES
from rayembed.errors import ArtifactError, AssetError, ConfigError
from rayembed.models.loading.load import load_model
from rayembed.models.saving.merge import merge, merge_models
from rayembed.proof.proof import read_proof
from rayembed_extras.merging.job import run_merge_job, shares_in
from rayembed_extras.merging.merge import models_of


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A start model as transformers saves it, and its fine-tuned model."""
    folder = tmp_path_factory.mktemp("merge")
    run = own_run(
        folder,
        *("stages.finetune.steps=8", "stages.finetune.checkpoint_every_steps=4"),
        "placement.keep_states=true",
        "model.lora={rank: 2, alpha: 4, target_modules: [dense, key, query, value]}",
    )
    (folder / "run.yaml").write_text(run.to_yaml())
    done = run_here("train_biencoder", "--recipe", str(folder / "run.yaml"))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "encoder", folder / "outputs/runs/own/models/finetune"


@pytest.mark.job
def test_a_base_and_its_fine_tuned_model_become_one_that_loads(models, tmp_path):
    base, tuned = models
    done = run_here(
        "merge_models",
        *("--model", str(base), "--model", str(tuned), "--shares", "0.25,0.75"),
        *("--output", str(tmp_path / "merged")),
    )
    assert done.returncode == 0, done.stderr
    assert f"Merged model: {tmp_path}/merged" in done.stdout
    assert read_proof(tmp_path / "merged") is not None
    states = [load_model(path, dtype="float32").state_dict() for path in (base, tuned)]
    found = load_model(tmp_path / "merged", dtype="float32").state_dict()
    moved = 0
    for name, weight in found.items():
        expected = 0.25 * states[0][name] + 0.75 * states[1][name]
        torch.testing.assert_close(weight, expected)
        moved += not torch.equal(weight, states[1][name])
    assert moved > 10
    made_of = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert made_of == {
        "method": "linear",
        "models": [str(base), str(tuned)],
        "shares": [0.25, 0.75],
    }
    assert rayembed.load(str(tmp_path / "merged")).encode("one text").shape == (32,)


@pytest.fixture
def checkpoints(models, tmp_path):
    """Folders of the two checkpoints of a copy of the run."""
    outputs = models[0].parent / "outputs"
    shutil.copytree(outputs / "runs", tmp_path / "outputs" / "runs")
    found = sorted((tmp_path / "outputs/runs/own/finetune/train").glob("step-*"))
    assert len(found) == 2
    return found


@pytest.mark.job
def test_checkpoints_of_a_stage_become_a_soup(checkpoints, tmp_path):
    place = tmp_path / "soup"
    given = [argument for one in checkpoints for argument in ("--model", str(one))]
    done = run_here("merge_models", *given, "--output", str(place))
    assert done.returncode == 0, done.stderr[-4000:]
    exported = tmp_path / "outputs/runs/own/models"
    states = [
        load_model(exported / f"finetune-{one.name}", dtype="float32").state_dict()
        for one in checkpoints
    ]
    found = load_model(place, dtype="float32").state_dict()
    last = load_model(exported / "finetune", dtype="float32").state_dict()
    moved = [name for name in last if not torch.equal(states[0][name], states[1][name])]
    assert moved
    for name, weight in found.items():
        torch.testing.assert_close(weight, (states[0][name] + states[1][name]) / 2)
        assert torch.equal(states[1][name], last[name]), "the last one is the stage's model"
    made_of = json.loads((place / "merge.json").read_text())
    assert made_of["models"] == [str(exported / f"finetune-{one.name}") for one in checkpoints]


@pytest.mark.job
def test_a_checkpoint_that_is_damaged_elsewhere_or_of_other_settings_is_refused(
    checkpoints, tmp_path
):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkpoints[0], elsewhere)
    with pytest.raises(ArtifactError, match="is not in its run's folder"):
        models_of([str(elsewhere)])
    settings = tmp_path / "outputs/runs/own/run.yaml"
    before = settings.read_text()
    settings.write_text(before.replace("seed: 0", "seed: 1"))
    assert settings.read_text() != before
    with pytest.raises(ArtifactError, match=r"have changed since .*; restore the settings"):
        models_of([str(checkpoints[0])])
    settings.write_text(before)
    next(checkpoints[0].glob("state-*")).unlink()
    with pytest.raises(ArtifactError, match="is incomplete"):
        models_of([str(checkpoints[0])])
    assert not (tmp_path / "outputs/runs/own/models" / f"finetune-{checkpoints[0].name}").exists()
    with pytest.raises(AssetError, match="missing"):
        models_of([str(checkpoints[1]), str(tmp_path / "missing")])
    gone = checkpoints[1].with_name("step-0000099")
    with pytest.raises(ArtifactError, match=r"no checkpoint .*placement\.keep_states=true"):
        models_of([str(gone)])
    assert not any((tmp_path / "outputs/runs/own/models").glob("finetune-step-*"))


@pytest.mark.job
def test_a_checkpoint_is_found_from_any_folder(checkpoints, tmp_path, monkeypatch):
    model = str(tmp_path / "outputs/runs/own/models" / f"finetune-{checkpoints[1].name}")
    monkeypatch.chdir(checkpoints[1].parent)
    monkeypatch.setenv("HOME", str(tmp_path))
    last = f"finetune/train/{checkpoints[1].name}"
    for reference in (checkpoints[1].name, f"~/outputs/runs/own/{last}/"):
        assert models_of([reference]) == [model]
    assert models_of([str(tmp_path / "outputs/runs/own/models/finetune")])[0].endswith("finetune")


@pytest.mark.job
def test_of_several_shares_the_one_with_the_highest_score_is_kept(models, tmp_path):
    base, tuned = models
    own = tmp_path / "shop"
    (own / "qrels").mkdir(parents=True)
    rows = write_pairs(tmp_path / "pairs.jsonl", 60)
    unique = list({row["positive"]: row for row in rows}.values())
    for name, column in (("corpus", "positive"), ("queries", "query")):
        lines = [json.dumps({"_id": f"{i}", "text": r[column]}) for i, r in enumerate(unique)]
        (own / f"{name}.jsonl").write_text("\n".join(lines))
    judged = "".join(f"{i}\t{i}\t1\n" for i in range(len(unique)))
    (own / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    given = (
        *("--model", str(base), "--model", str(tuned), "--output", str(tmp_path / "merged")),
        *("--storage-path", str(tmp_path / "outputs")),
    )
    several = ("--shares", "0.9,0.1", "--shares", "0.1,0.9")
    done = run_here("merge_models", *given, *several)
    assert done.returncode == 2
    assert "--shares gives 2 candidates, but there are no tasks" in done.stderr
    done = run_here("merge_models", *given, *several, "--own-set", f"shop={own}")
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "merged" / "merge.json").read_text())
    scores = {label: found["shop"] for label, found in told["scores"].items()}
    assert scores.keys() == {"model 1", "model 2", "linear 0.9, 0.1", "linear 0.1, 0.9"}
    kept = max(("linear 0.9, 0.1", "linear 0.1, 0.9"), key=scores.get)
    assert len(set(scores.values())) == 4, "otherwise nothing is chosen"
    assert f"linear {', '.join(f'{share:g}' for share in told['shares'])}" == kept
    states = [load_model(path, dtype="float32").state_dict() for path in (base, tuned)]
    found = load_model(tmp_path / "merged", dtype="float32").state_dict()
    for name, weight in found.items():
        first, second = told["shares"]
        torch.testing.assert_close(weight, first * states[0][name] + second * states[1][name])
    assert ("Better:" in done.stdout) == (max(scores, key=scores.get) != kept)
    assert "kept" in (tmp_path / "merged" / "merge.md").read_text()
    assert not list(tmp_path.glob(".candidate-*"))


@pytest.mark.job
def test_the_last_share_alone_is_the_last_model(models, tmp_path):
    base, tuned = models
    merge_models([str(base), str(tuned)], tmp_path / "all", shares=(0.0, 1.0))
    texts = ["cats live", "the river"]
    found = rayembed.load(str(tmp_path / "all")).encode(texts)
    torch.testing.assert_close(
        torch.as_tensor(found), torch.as_tensor(rayembed.load(str(tuned)).encode(texts))
    )


@pytest.mark.job
def test_models_that_do_not_fit_are_refused_and_nothing_is_written(models, tmp_path):
    base, tuned = models
    other = save_encoder(tmp_path / "other")
    vocabulary = json.loads((tmp_path / "other/tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    one, two = sorted(words)[:2]
    words[one], words[two] = words[two], words[one]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ArtifactError, match="different vocabularies"):
        merge_models([str(other), str(tuned)], tmp_path / "merged")
    shorter = {
        name: w for name, w in load_model(base).state_dict().items() if "layer.1" not in name
    }
    with pytest.raises(ArtifactError, match="of their weights differ in name or shape, such as"):
        merge("linear", [load_model(tuned).state_dict(), shorter], (0.5, 0.5))
    done = run_here("merge_models", "--model", str(base), "--output", str(tmp_path / "merged"))
    assert done.returncode == 2
    assert "linear merges at least two models" in done.stderr
    done = run_here(
        "merge_models",
        *("--model", str(base), "--model", str(tuned), "--shares", "half"),
        *("--output", str(tmp_path / "merged")),
    )
    assert done.returncode == 2
    assert "must be numbers with commas" in done.stderr
    assert not (tmp_path / "merged").exists()


SHORT, WHOLE = next(iter(SHORT_NAMES.items()))


def test_models_may_be_named_as_everywhere():
    assert run_merge_job.arguments(["--model", SHORT, "--output", "x"]).model == [WHOLE]


def test_shares_are_finite_numbers():
    assert shares_in("0.5,1e-3") == (0.5, 1e-3)
    with pytest.raises(ConfigError, match="must be numbers"):
        shares_in("0.5,nan")
