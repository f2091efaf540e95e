"""The registry job in this process, over a SQLite store."""

import argparse
import math
import shutil

import numpy as np
import pytest
from huggingface_hub import ModelCard
from made_up_articles import run_over
from mlflow import MlflowClient
from mlflow_uris import mlflow_at
from registered import register
from result_files import write_results
from tiny_folders import save_biencoder, save_nvembed
from upload_hub import upload_hub

from rayembed.errors import ConfigError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.pipeline.job import option
from rayembed.pipeline.register import job as register_job
from rayembed.pipeline.register.job import run_register_job
from rayembed.registry.promote import Gates
from rayembed.registry.registered_model import ModelReference, download, get_version, read_scores
from rayembed.registry.tracking import Tracker

DESCRIPTION, TOPICS = "WikiDescriptionRetrieval", "WikiTopicClassification"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three models with other weights, and what each scored."""
    home = tmp_path_factory.mktemp("models")
    made = []
    for number, value in enumerate((0.5, 0.6, 0.4), start=1):
        folder = save_biencoder(home / f"model{number}", seed=number)
        place = home / "out" / "results" / f"rayembed__m{number}"
        weights = weights_fingerprint(folder)
        write_results(place / f"{weights}-1", {DESCRIPTION: value, TOPICS: value + 0.1})
        made.append(folder)
    return home, made


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A store with its tables, which MLflow takes seconds to make."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    client_of(path).search_registered_models()
    return path


@pytest.fixture
def store(tmp_path, monkeypatch, empty_store):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    return shutil.copy(empty_store, tmp_path / "mlflow.db")


def client_of(store):
    uri = f"sqlite:///{store}"
    return MlflowClient(uri, uri)


@pytest.fixture
def job(store, capsys):
    """Runs the job and gives its exit code and what it printed."""

    def run(*arguments):
        code = run_register_job([*arguments, "--tracking-uri", f"sqlite:///{store}"], about="x")
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def aliases(store):
    return dict(client_of(store).get_registered_model("tiny").aliases)


def everything(client):
    """All that a registration or a promotion changes."""
    versions = client.search_model_versions()
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return (
        {(v.name, v.version, tuple(sorted(v.tags.items())), v.description) for v in versions},
        {run.info.run_id for run in runs},
        {m.name: dict(m.aliases) for m in client.search_registered_models()},
    )


def test_a_gate_that_fails_after_the_version_was_made_is_told(folders, store, job, monkeypatch):
    """Another version becomes champion between the look at the gates and the move."""
    home, (first, second, _) = folders
    results = ("--results", str(home / "out"))
    gates = ("--promote", "--better-than", "champion")
    judged = register_job.promote

    def late(client, name, number, scores, asked):
        monkeypatch.setattr(register_job, "promote", judged)
        code, *_ = job("--model", str(second), "--name", "tiny", *results, *gates)
        assert code == 0
        return judged(client, name, number, scores, asked)

    monkeypatch.setattr(register_job, "promote", late)
    code, out, _ = job("--model", str(first), "--name", "tiny", *results, *gates)
    assert (code, aliases(store)) == (1, {"champion": 2})
    assert "REFUSED" in out
    assert "Version 1 is registered all the same" in out


def test_no_model_becomes_champion_with_the_scores_of_another(folders, store, job, tmp_path):
    _, (first, second, _) = folders
    weights = [weights_fingerprint(folder) for folder in (first, second)]
    model = ("--model", str(first), "--name", "tiny", "--promote", "--require", "mean>=0.6")
    other = write_results(tmp_path / f"{weights[1]}-aaaaaaaa", {DESCRIPTION: 0.65})
    for trust in ((), ("--trust-results",)):
        code, _, err = job(*model, "--results", str(other), *trust)
        assert code == 1
        assert f"with the weights {weights[1]}, but this model has the weights {weights[0]}" in err
    hub = write_results(tmp_path / ("5ec0de" * 6 + "aaaa"), {DESCRIPTION: 0.65})
    code, _, err = job(*model, "--results", str(hub))
    assert code == 1
    assert f"are not marked as those of this model's weights ({weights[0]})" in err
    assert client_of(store).search_registered_models() == []
    # On the user's word, and with its own.
    code, out, _ = job(*model, "--results", str(hub), "--trust-results", "--dry-run")
    assert (code, "all gates hold" in out) == (0, True)
    own = write_results(tmp_path / f"{weights[0]}-aaaaaaaa", {DESCRIPTION: 0.65})
    code, out, _ = job(*model, "--results", str(own))
    assert (code, "all gates hold" in out) == (0, True)


def test_the_model_is_pushed_to_the_hub_with_its_card(folders, store, job, monkeypatch):
    _, (first, *_) = folders
    asked = ("--model", str(first), "--name", "tiny", "--push-to-hub", "org/tiny")
    with upload_hub(monkeypatch) as hub:
        code, out, _ = job(*asked, "--dry-run")
        assert (code, hub.files) == (0, {})
        assert "uploaded to org/tiny" in out
        code, out, _ = job(*asked)
    assert (code, "/org/tiny" in out) == (0, True)
    assert {"model.safetensors", "modules.json", "rayembed.json"} <= hub.files.keys()
    assert b"# tiny" in hub.files["README.md"]
    # The version has a proof, the folder has none and is uploaded as it is.
    version = client_of(store).get_model_version("tiny", "1")
    assert "## Check of a copy" in version.description
    assert b"## Check of a copy" not in hub.files["README.md"]
    assert "proof/proof.json" not in hub.files
    for wrong, message in (
        (("--model", str(first), "--push-to-hub", "tiny"), "expected org/name"),
        (("--rollback", "--push-to-hub", "org/tiny"), "--rollback cannot be combined with"),
    ):
        code, _, err = job("--name", "tiny", *wrong)
        assert (code, message in err) == (2, True)
    code, _, err = job("--model", "models:/tiny/1", "--push-to-hub", "org/tiny")
    assert "name as --model the exported folder" in err


def test_from_the_first_registration_to_a_rollback(folders, store, job, tmp_path):
    home, (first, second, third) = folders
    results = ("--results", str(home / "out"))
    gates = ("--promote", "--require", "Retrieval>=0.45", "--better-than", "champion")

    code, out, _ = job("--model", str(first), "--name", "tiny", *results)
    assert "tiny version 1 (models:/tiny/1)" in out
    assert "2 tasks" in out
    assert (code, aliases(store)) == (0, {"candidate": 1})

    card = tmp_path / "card.md"
    code, out, _ = job(
        "--model", str(first), "--name", "tiny", *results, *gates, "--card", str(card)
    )
    assert (code, "there is no champion yet" in out) == (0, True), out
    assert aliases(store) == {"candidate": 1, "champion": 1}
    data = ModelCard.load(card).data
    assert {r.dataset_name: r.metric_value for r in data.eval_results} == {
        DESCRIPTION: 0.5,
        TOPICS: 0.6,
    }
    assert str(home) not in card.read_text()

    # In one go: registered, scored and promoted.
    code, out, _ = job("--model", str(second), "--name", "tiny", *results, *gates)
    assert code == 0, out
    assert aliases(store) == {"candidate": 1, "champion": 2, "previous": 1}

    client = client_of(store)
    known = everything(client)
    for more, told in (
        (("--dry-run",), "no version would be registered"),
        ((), "Nothing was registered: weights"),
    ):
        code, out, _ = job("--model", str(third), "--name", "tiny", *results, *gates, *more)
        assert code == 1
        assert "REFUSED" in out
        assert told in out
        rows = [[cell.strip() for cell in line.split("│")[1:5]] for line in out.splitlines()]
        assert ["Retrieval >= 0.45", "0.4000", "0.4500", "NO"] in rows
        assert ["mean, against version 2", "0.4500", "0.6500", "NO"] in rows
        assert everything(client) == known
    assert client.get_model_version("tiny", "2").description.startswith("# tiny")

    # Registered without gates it is the candidate, and its version keeps what refuses it.
    code, _, _ = job("--model", str(third), "--name", "tiny", *results)
    before = {"candidate": 3, "champion": 2, "previous": 1}
    assert (code, aliases(store)) == (0, before)
    assert client.get_model_version("tiny", "3").tags["score.category/Retrieval"] == "0.4"
    code, out, _ = job("--model", "models:/tiny/3", *gates)
    assert (code, aliases(store)) == (1, before)
    assert "REFUSED" in out
    assert "registered" not in out
    assert '"do not hold"' in client.get_model_version("tiny", "3").tags["rayembed.promotion"]

    # By its version, with the scores that are kept with it.
    code, out, _ = job(
        "--model", "models:/tiny/3", "--promote", "--require", f"{TOPICS}>=0.5", "--dry-run"
    )
    assert (code, aliases(store)) == (0, before)
    assert "Nothing is changed (--dry-run)" in out
    code, _, _ = job("--model", "models:/tiny/3", "--promote", "--require", f"{TOPICS}>=0.5")
    assert (code, aliases(store)) == (0, {"candidate": 3, "champion": 3, "previous": 2})

    code, out, _ = job("--rollback", "--name", "tiny", "--dry-run")
    assert (code, aliases(store)["champion"]) == (0, 3)
    assert "Champion   version 2" in out
    for _ in range(2):
        code, out, _ = job("--rollback", "--name", "tiny")
        assert (code, aliases(store)) == (0, {"candidate": 3, "champion": 2, "previous": 3})
    assert "version 2 (as before)" in out
    assert [m.name for m in client.search_registered_models()] == ["tiny"]
    assert len(client.search_model_versions("name='tiny'")) == 3


def test_a_registered_folder_comes_back_whole(folders, store, job):
    _, (first, *_) = folders
    job("--model", str(first), "--name", "tiny")
    client = client_of(store)
    version = get_version(client, ModelReference("tiny", 1, None))
    back = download(client, version, tracking_uri=f"sqlite:///{store}")
    assert weights_fingerprint(back) == weights_fingerprint(first)
    assert download(client, version, tracking_uri=f"sqlite:///{store}") == back
    assert read_scores(client, version) == ()
    # And can be registered under another name from there.
    code, _, err = job("--model", "models:/tiny/1", "--name", "copy")
    assert code == 0, err
    assert client.get_model_version("copy", "1").tags["rayembed.weights_fingerprint"] == (
        weights_fingerprint(first)
    )


def test_a_model_without_scores_is_no_candidate_until_it_has_some(folders, store, job):
    home, (first, second, third) = folders
    results = ("--results", str(home / "out"))
    code, out, _ = job("--model", str(first), "--name", "tiny")
    assert (code, aliases(store)) == (0, {})
    assert "rayembed evaluate --model models:/tiny/1 " in out
    text = client_of(store).get_model_version("tiny", "1").description
    assert "Not scored. No score of this model is known; to score it: `rayembed eval" in text
    assert 'load_model("models:/tiny/VERSION")' in text
    assert "@candidate" not in text
    # No gate may judge it, also not the one that holds as long as there is no champion.
    for gate in (("--require", "mean>=0"), ("--better-than", "champion")):
        code, _, err = job("--model", "models:/tiny/1", "--promote", *gate)
        assert (code, aliases(store)) == (2, {})
        assert "no scores to judge; to score it: `rayembed evaluate --model mo" in err
        assert "rayembed register --model models:/tiny/1 --results" in err
    code, _, err = job("--model", str(first), "--name", "tiny", "--promote", *gate)
    assert f"rayembed register --model {first} --name tiny --results" in err
    # The control: with scores it is the candidate, and stays it beside a later one without.
    assert job("--model", str(second), "--name", "tiny", *results)[0] == 0
    assert job("--model", str(third), "--name", "tiny")[0] == 0
    assert aliases(store) == {"candidate": 2}
    # With its first scores a version is the candidate, with further ones it is not again.
    assert job("--model", "models:/tiny/1", *results)[0] == 0
    assert job("--model", "models:/tiny/2", *results)[0] == 0
    assert aliases(store) == {"candidate": 1}
    text = client_of(store).get_model_version("tiny", "1").description
    assert 'load_model("models:/tiny@candidate")' in text
    assert "Not scored" not in text
    assert job("--model", "models:/tiny/1", "--promote", *gate, "--dry-run")[0] == 0


def test_a_plain_sentence_transformers_folder_is_registered(store, job, tmp_path):
    """With prompts, a Dense module and no rayembed.json; it answers as itself."""
    import mlflow
    from sentence_transformers import SentenceTransformer

    from rayembed.config.backbone import ProjectionConfig

    folder = save_biencoder(tmp_path / "other", projections=(ProjectionConfig(width=6),))
    (folder / "rayembed.json").unlink()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Other\n")
    code, _, err = job("--model", str(folder), "--name", "other")
    assert code == 0, err
    client = client_of(store)
    version = client.get_model_version("other", "1")
    assert "Its home states the licence mit." in version.description
    assert "a vector of 6 numbers" in version.description
    with mlflow_at(f"sqlite:///{store}"):
        answer = mlflow.pyfunc.load_model("models:/other/1").predict(
            {"input": ["a fox"], "role": "query"}
        )
    wanted = SentenceTransformer(str(folder), device="cpu").encode_query(["a fox"])
    np.testing.assert_allclose([d["embedding"] for d in answer["data"]], wanted, atol=1e-6)


def test_the_card_of_a_trained_model_is_written_from_its_run(store, job, tmp_path):
    """The version that training registered: its run.yaml and provenance lie in its MLflow run."""
    uri = f"sqlite:///{store}"
    folder = save_nvembed(tmp_path / "model")
    weights = weights_fingerprint(folder)
    run = run_over("articles.json")
    tracker = Tracker.open(
        uri, "tests", run.name, run.fingerprint, {}, {}, folder=tmp_path / "run", total_steps=1
    )
    tracker.log_resolved_run(run.to_yaml())
    counts = [{"kind": "records", "fingerprint": "f", "rows_out": 12345}]
    name = run.data.datasets[0].name
    tracker.log_provenance({"code": {"commit": "c0ffee"}, "data": {"s": {name: counts}}})
    register(
        folder,
        "tiny",
        tracker=tracker,
        weights_fingerprint=weights,
        dimensions=(32,),
        instruction_template=None,
        global_step=9,
    )
    tracker.close("FINISHED")
    results = write_results(tmp_path / "r" / "results" / "org__m" / weights, {DESCRIPTION: 0.5})
    card = tmp_path / "README.md"
    # The folder and the version are one: no second version is made.
    code, out, err = job(
        "--model", str(folder), "--name", "tiny", "--results", str(results), "--card", str(card)
    )
    assert code == 0, err
    assert "tiny version 1 " in out
    text = card.read_text()
    assert f"fingerprint `{run.fingerprint}`" in text
    assert f"| `{name}` | retrieval | 12,345 | unknown |" in text
    assert "commit c0ffee" in text
    client = client_of(store)
    version = client.get_model_version("tiny", "1")
    assert version.run_id == tracker.run_id
    model = client.get_logged_model(version.tags["rayembed.model_id"])
    assert {(m.key, m.value) for m in model.metrics} == {
        (f"model/{DESCRIPTION}", 0.5),
        ("model/category/Retrieval", 0.5),
        ("model/mean", 0.5),
    }
    assert client.get_run(version.run_id).data.metrics[f"model/{DESCRIPTION}"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--model is required"),
        (["--model", "x"], 2, "--name is required"),
        (["--model", "x", "--name", "a/b"], 2, "letters, digits, spaces and . _ + -, not '/'"),
        (
            ["--model", "x", "--name", "it's"],
            2,
            """letters, digits, spaces and . _ + -, not "'":""",
        ),
        (["--rollback", "--name", 'a"b'], 2, """letters, digits, spaces and . _ + -, not '"':"""),
        (["--model", "x", "--name", "n", "--trust-results"], 2, "add --results FOLDER"),
        (["--model", "x", "--name", "n", "--promote"], 2, "--promote needs a gate"),
        (["--model", "x", "--name", "n", "--require", "a>=1"], 2, "add --promote"),
        (["--model", "x", "--name", "n", "--promote", "--require", "a>1"], 2, "is no gate"),
        (
            ["--model", "x", "--name", "n", "--promote", "--require", "a>=1", "--tolerance", "0.1"],
            2,
            "--tolerance applies to --better-than",
        ),
        (["--rollback", "--name", "n", "--promote"], 2, "--rollback cannot be combined with"),
        (["--rollback", "--name", "n"], 1, "no registered model 'n'"),
        (["--model", "models:/n@champion"], 1, "no registered model 'n'"),
        (["--model", "models:/n"], 2, "write models:/name@alias or models:/name/version"),
        (["--model", "/nothing", "--name", "n"], 1, "no file or folder '/nothing'"),
    ],
)
def test_what_does_not_hold_is_told_before_anything_is_changed(
    job, store, arguments, code, message
):
    found, _, err = job(*arguments)
    assert (found, message in err) == (code, True), err
    assert client_of(store).search_registered_models() == []


def test_scores_that_are_missing_are_told_before_anything_is_changed(folders, store, job, tmp_path):
    home, (first, *_) = folders
    model = ("--model", str(first), "--name", "tiny")
    gate = ("--promote", "--require", "SciFact>=0.5")
    cases = [
        ((*model, *gate), 2, "has no scores to judge"),
        ((*model, *gate, "--results", str(home / "out")), 2, "no scores of a task or category"),
        ((*model, "--results", str(tmp_path)), 1, "has no scores of the weights"),
        ((*model, "--results", str(tmp_path / "none")), 1, "no file or folder"),
    ]
    for arguments, code, message in cases:
        found, _, err = job(*arguments)
        assert (found, message in err) == (code, True), err
    assert client_of(store).search_registered_models() == []


def test_folders_that_could_not_be_loaded_from_the_registry_are_refused(folders, job, tmp_path):
    _, (first, *_) = folders
    plain = shutil.copytree(first, tmp_path / "plain")
    (plain / "modules.json").unlink()
    code, _, err = job("--model", str(plain), "--name", "tiny")
    assert code == 1
    assert "has no modules.json" in err
    (plain / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "own.Code"}]')
    code, _, err = job("--model", str(plain), "--name", "tiny")
    assert code == 1
    assert "its modules ['own.Code'] are code that it brings itself" in err


def test_mlflow_that_is_away_is_told(job, capsys, folders, tmp_path):
    _, (first, *_) = folders
    code = run_register_job(
        ["--model", str(first), "--name", "t", "--tracking-uri", "http://127.0.0.1:9"], about=None
    )
    assert code == 1
    assert "no MLflow server at http://127.0.0.1:9" in capsys.readouterr().err
    where = tmp_path / "none.db"
    code = run_register_job(
        ["--rollback", "--name", "t", "--tracking-uri", f"sqlite:///{where}"], about=None
    )
    assert code == 1
    assert "there is no MLflow database" in capsys.readouterr().err
    assert not where.exists()


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999", "half"])
def test_a_tolerance_that_is_no_finite_number_is_refused(number, capsys):
    argv = ["--name", "x", "--model", "m", "--promote", "--better-than", "champion"]
    with pytest.raises(SystemExit) as ended:
        run_register_job([*argv, f"--tolerance={number}"])
    assert ended.value.code == 2
    assert f"'{number}' must be a finite number" in capsys.readouterr().err


def test_gates_take_no_tolerance_that_lets_every_loss_through():
    for tolerance in (math.nan, math.inf, -0.1):
        with pytest.raises(ConfigError, match="finite number, 0 or more"):
            Gates(better_than="champion", tolerance=tolerance)


def test_every_option_of_a_number_refuses_what_is_not_finite():
    made = option("--hours H", "hours", type=float)
    for text in ("nan", "inf", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="finite number"):
            made.arguments["type"](text)
    assert made.arguments["type"]("1e-3") == 1e-3
