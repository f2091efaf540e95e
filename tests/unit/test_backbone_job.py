"""jobs/evaluate_backbone.py without a cluster: what it prints, and what it refuses early."""

import json
import pickle
import shutil

import pytest
import safetensors.torch
import yaml
from made_up_benchmarks import GLUE, glue_files, write_copies
from mlflow import MlflowClient
from tiny_models import save_decoder, save_encoder, save_nomic, wordpiece_tokenizer

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, WorkerError
from rayembed_papers.backbone.evaluation import evaluate_backbone, find_backbone, plan_of
from rayembed_papers.backbone.finetune import Grid
from rayembed_papers.backbone.job import run_backbone_job
from rayembed_papers.backbone.on_ray import attempt
from rayembed_papers.backbone.results import find_results, trials_of
from rayembed_papers.backbone.rows import prepare
from rayembed_papers.backbone.settings import BackboneRun
from rayembed_papers.backbone.trial import run_trial


def job(capsys, *argv):
    code = run_backbone_job([str(word) for word in argv], about="")
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("backbone") / "tiny")


def test_a_dry_run_prints_a_file_that_gives_the_same_run(tmp_path, capsys):
    code, out, err = job(capsys, "--backbone", "x", "--benchmark", "glue", "--dry-run")
    assert code == 0
    assert "240 trials" in err
    assert "MNLI" in err
    file = tmp_path / "run.yaml"
    file.write_text(out)
    assert yaml.safe_load(out)["benchmarks"] == ["glue"]
    again = job(capsys, "--recipe", file, "--dry-run")
    assert again == (0, out, err)
    _, _, fewer = job(capsys, "--recipe", file, "--set", "protocol.seeds=[0]", "--dry-run")
    assert "48 trials" in fewer


def test_the_list_has_what_is_left_out_and_why(capsys):
    code, out, _ = job(capsys, "--list")
    assert code == 0
    assert "glue      CoLA          matthews" in out
    assert "left out  Mewsli-X" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--benchmark", "glue"), "no backbone"),
        (("--backbone", "x"), "nothing to finetune on"),
        (("--backbone", "x", "--tasks", "RTF"), "did you mean 'RTE'"),
        (("--backbone", "x", "--tasks", "RTE", "--set", "precisions=float32"), "'precision'"),
        (("--backbone", "s3://key:secret@bucket/x", "--tasks", "RTE"), "password or key"),
    ],
)
def test_what_is_asked_wrongly_ends_with_2(capsys, argv, message):
    code, _, err = job(capsys, *argv, "--dry-run")
    assert code == 2
    assert message in err


def test_a_backbone_that_cannot_serve_is_refused_before_any_data(bert, tmp_path, capsys):
    """The data folder does not exist: whoever looked there would say so."""
    common = ("--set", f"placement.storage_path={tmp_path}", "--set", "data_root=/nowhere")
    code, _, err = job(capsys, "--backbone", bert, "--tasks", "RTE", *common)
    assert code == 2
    assert "RTE reads 128 tokens" in err or "MNLI reads 128 tokens" in err
    code, _, err = job(capsys, "--backbone", tmp_path, "--tasks", "RTE", *common)
    assert (code, "config.json" in err) == (1, True)
    swiglu = save_nomic(tmp_path / "swiglu", prenorm=True)
    code, _, err = job(capsys, "--backbone", swiglu, "--tasks", "RTE", *common)
    assert (code, "prenorm" in err) == (1, True)
    code, _, err = job(
        capsys, "--backbone", bert, "--tasks", "RTE", *common, "--set", "protocol.max_length=32"
    )
    assert (code, "/nowhere" in err) == (1, True)


@pytest.fixture
def refused(tmp_path, capsys):
    """Exit code and errors of a job on a backbone; the data folder does not exist."""

    def ask(backbone, tasks="RTE"):
        settings = (
            f"placement.storage_path={tmp_path / 'storage'}",
            "data_root=/nowhere",
            "protocol.max_length=32",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        code, _, err = job(capsys, "--backbone", backbone, "--tasks", tasks, *words)
        return code, err

    return ask


@pytest.mark.parametrize("family", ["bert", "moe"])
def test_a_backbone_without_all_of_its_weights_is_refused_before_any_data(
    bert, tmp_path, refused, family
):
    whole = bert if family == "bert" else save_nomic(tmp_path / "moe", vocab_size=200)
    folder = shutil.copytree(whole, tmp_path / "copy")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    code, err = refused(folder)
    assert (code, "/nowhere" in err) == (1, True), "the control: with its weights it goes on"

    file.write_bytes(content[:-100])
    code, err = refused(folder)
    assert (code, "/nowhere" in err) == (1, False)
    assert "model.safetensors' is cut off: it has" in err

    weights = safetensors.torch.load(content)
    # The longest: of a gate or a bias the first seven rows may be all. Their order is chance's.
    lost = max(sorted(weights), key=lambda name: ("layer" in name, weights[name].numel()))
    kept = {name: value for name, value in weights.items() if name != lost}
    safetensors.torch.save_file(kept, file, {"format": "pt"})
    code, err = refused(folder)
    assert (code, "/nowhere" in err, lost in err) == (1, False, True)
    assert "lacks 1 weights" in err or "missing 1 " in err

    safetensors.torch.save_file(weights | {lost: weights[lost][:7].clone()}, file, {"format": "pt"})
    code, err = refused(folder)
    assert (code, "/nowhere" in err, lost in err) == (1, False, True)
    assert "1 weights of other shapes" in err or "of other shapes 1" in err

    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file.rename(folder / "model-1-of-2.safetensors")
    code, err = refused(folder)
    assert (code, "1 are missing: model-2-of-2.safetensors" in err) == (1, True)


def test_a_family_without_a_head_is_refused_before_any_data(tmp_path, refused):
    llama = save_decoder(tmp_path / "llama", tokenizer=wordpiece_tokenizer())
    code, err = refused(llama, "RTE,XCOPA")
    assert (code, "/nowhere" in err) == (2, False)
    assert "'llama' have no head for SIQa, COPA (AutoModelForMultipleChoice of" in err
    code, err = refused(llama, "RTE")
    assert (code, "/nowhere" in err) == (1, True), "the control: without those tasks it goes on"


def test_a_trial_tells_of_what_trying_again_does_not_mend(bert, tmp_path):
    root = write_copies(tmp_path / "copies", {GLUE: glue_files()})
    protocol = {"max_length": 24, "epochs": 1, "batch_sizes": [4], "seeds": [0]}
    settings = {
        **{"backbone": str(bert), "tasks": ["CoLA"], "data_root": str(root)},
        **{"protocol": {**protocol, "learning_rates": [1e-3]}, "precision": "float32"},
    }
    run = parse(BackboneRun, settings)
    plan = plan_of(run)
    backbone = find_backbone(run, plan)
    data = prepare(plan.finetunings, str(tmp_path / "data"), run.data_root)
    (one,) = plan.finetunings
    (trial,) = trials_of(one, backbone, data, str(tmp_path), keeps_model=False, start=None)
    assert attempt(trial, use_gpu=False, predict_batch=8) is None
    (result,) = find_results([trial])
    assert set(result.scores["CoLA"]["validation"]) == {"accuracy", "f1", "matthews"}
    assert trial.grid == Grid(learning_rate=1e-3, batch_size=4, seed=0)
    (bert / "vocab.txt").write_text("another tokenizer")
    problem = pickle.loads(pickle.dumps(attempt(trial, use_gpu=False, predict_batch=8)))
    (bert / "vocab.txt").unlink()
    assert isinstance(problem, ArtifactError)
    assert "has the weights" in str(problem)
    # Its result is there, so nothing needs a cluster.
    placed = run.model_copy(
        update={"placement": run.placement.model_copy(update={"storage_path": str(tmp_path / "s")})}
    )
    moved = tmp_path / "s" / "backbones" / "results" / "tiny" / backbone.weights / "trials"
    moved.parent.mkdir(parents=True)
    (tmp_path / "trials").rename(moved)
    scores = evaluate_backbone(placed)
    assert list(scores.summaries) == ["CoLA"]
    assert any(name.endswith(".md") for name in scores.reports)


class InThisProcess:
    """In place of Ray's tasks: the trials one after the other, some of them failing."""

    def __init__(self, *failing):
        self.failing, self.done = failing, []

    def __call__(self, trials, placement, when_done):
        ended = {}
        for trial in trials:
            if trial.finetuning.name in self.failing:
                ended[trial.key] = WorkerError("it died too often")
            else:
                run_trial(trial, use_gpu=False, predict_batch=placement.predict_batch)
                self.done.append(trial.key)
            when_done(trial, ended.get(trial.key))
        return ended


@pytest.fixture
def grid(monkeypatch):
    def put(*failing):
        made = InThisProcess(*failing)
        monkeypatch.setattr("rayembed_papers.backbone.on_ray.run_trials", made)
        monkeypatch.setattr("rayembed.pipeline.run.on_ray.connect", lambda: None)
        return made

    return put


def test_a_job_goes_on_where_it_stopped_and_ends_in_mlflow(bert, tmp_path, grid, capsys):
    root = write_copies(tmp_path / "copies", {GLUE: glue_files()})
    storage = tmp_path / "storage"
    changes = {
        "data_root": root,
        "precision": "float32",
        "protocol.epochs": 1,
        "protocol.max_length": 24,
        "protocol.learning_rates": "[1e-3]",
        "protocol.batch_sizes": "[4]",
        "protocol.seeds": "[0, 1]",
        "placement.storage_path": storage,
    }
    words = [word for item in changes.items() for word in ("--set", "{}={}".format(*item))]
    command = ("--backbone", bert, "--tasks", "RTE,CoLA", *words)
    failed = grid("MNLI")
    code, out, _ = job(capsys, *command)
    assert code == 1
    assert "it died too often" in out
    assert "RTE starts from the best model of MNLI, whose trials are not all done" in out
    assert "run the same command again to compute only what is missing" in out
    assert [key.partition("/")[0] for key in failed.done] == ["CoLA", "CoLA"]
    whole = grid()
    code, out, _ = job(capsys, *command)
    assert code == 0
    assert [key.partition("/")[0] for key in whole.done] == ["MNLI", "MNLI", "RTE", "RTE"]
    header = next(line for line in out.splitlines() if line.startswith("| Model"))
    assert header == "| Model | CoLA | RTE | Mean of these |"
    (folder,) = storage.glob("backbones/results/tiny/*")
    assert len(list(folder.glob("models/MNLI/*"))) == 1, "that of the better one"
    nothing = grid()
    assert job(capsys, *command)[0] == 0
    assert nothing.done == []
    client = MlflowClient(f"sqlite:///{storage / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rayembed-backbones")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    scores = [
        json.loads(path.read_text())["scores"]["RTE"]["validation"]["accuracy"]
        for path in folder.glob("trials/RTE/*.json")
    ]
    assert tracked.data.metrics["glue/RTE"] == pytest.approx(sum(scores) / 2)
    assert set(tracked.data.metrics) == {
        f"{name}/{task}"
        for name, tasks in {
            "glue": ("RTE", "CoLA", "average"),
            "glue_all_trials": ("RTE", "CoLA"),
        }.items()
        for task in tasks
    }
    files = {item.path for item in client.list_artifacts(tracked.info.run_id, "results")}
    assert any(path.endswith(".csv") for path in files)


def test_trials_that_diverge_are_told_and_not_done_again(bert, tmp_path, grid, capsys, caplog):
    root = write_copies(tmp_path / "copies", {GLUE: glue_files()})
    changes = {
        "data_root": root,
        "precision": "float32",
        "protocol.epochs": 1,
        "protocol.max_length": 24,
        "protocol.batch_sizes": "[4]",
        "protocol.seeds": "[0]",
        "placement.storage_path": tmp_path / "storage",
    }
    words = [word for item in changes.items() for word in ("--set", "{}={}".format(*item))]
    command = ("--backbone", bert, "--tasks", "RTE,CoLA", *words, "--set")
    grid()
    code, out, _ = job(capsys, *command, "protocol.learning_rates=[1e-3, 1e30]")
    assert code == 0
    assert "Trials that diverged, and are no results: CoLA 1 of 2, RTE 1 of 2." in out
    assert "| RTE | accuracy | 0.001 | 4 |" in out
    said = (
        "1 of 2 trials of CoLA diverged; these trials have no score and are left out of the medians"
    )
    assert said in caplog.messages
    client = MlflowClient(f"sqlite:///{tmp_path / 'storage' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rayembed-backbones")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.data.metrics["glue_diverged_trials/CoLA"] == 1.0
    alone = grid()
    code, out, _ = job(capsys, *command, "protocol.learning_rates=[1e30]")
    assert code == 1
    assert alone.done == [], "their results are known"
    told = "1 of 1 trials of MNLI diverged, with a loss or outputs that are not finite"
    assert told in out
    assert "Lower protocol.learning_rates=[1e+30]" in out
    assert "RTE starts from the best model of MNLI, whose trials all diverged" in out
    assert "the same command again" not in out
