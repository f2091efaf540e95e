"""The evaluation job from its command line to result files, with a tiny model and a made-up hub."""

import json
import os
import signal
import sys
from pathlib import Path

import prepared
import pytest
from forked_workers import script
from mteb_hub import mteb_hub
from plain_scores import largest_difference, result_of
from tiny_models import save_encoder

import rayembed
from rayembed.errors import TrackingError
from rayembed.evaluation.benchmarks import MtebTask
from rayembed.pipeline.evaluate.job import run_evaluation_job

pytestmark = pytest.mark.job

ROOT = Path(rayembed.__file__).parents[2]
SERVED = ("NFCorpus", "AskUbuntuDupQuestions", "STS12", "SummEval", "Banking77Classification")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with mteb_hub([MtebTask(name).load() for name in SERVED], tmp_path_factory.mktemp("hub")) as it:
        yield it


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def own_set(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "shop"
    (folder / "qrels").mkdir(parents=True)
    texts = ["cats live in Paris", "the ancient bridge", "a fox jumps", "dogs of the river"]
    corpus = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(texts)]
    queries = [{"_id": f"q{i}", "text": text.split()[-1]} for i, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(4))]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines))
    return folder


def run(*arguments, storage):
    command = script(str(ROOT / "jobs" / "evaluate_model.py"), *map(str, arguments))
    command += [f"--set=placement.storage_path={storage}", "--set=model.dtype=float32"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    return prepared.run(command, env=environment, timeout=400)


@pytest.mark.ray
def test_scores_are_those_of_plain_mteb_and_what_is_there_is_not_done_again(
    hub, model, own_set, tmp_path
):
    tasks = ",".join([*SERVED, "BIOSSES"])  # the hub has no BIOSSES
    asked = ("--model", model, "--tasks", tasks, "--own-set", f"Shop={own_set}")
    done = run(*asked, "--set=placement.workers=2", storage=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, "a process that ends with an error says it plainly"
    assert "Without a score" in done.stdout
    assert "BIOSSES" in done.stdout.partition("Without a score")[2]
    places = (tmp_path / "evaluation" / "results").glob("*/*")  # the model's, and two of its rows
    (place,) = [one for one in places if (one / f"{SERVED[0]}.json").is_file()]
    files = {path.stem for path in place.glob("*.json")}
    assert files == {*SERVED, "Shop", "model_meta"}  # other JSON files mteb takes for results
    about = {path.name for path in place.iterdir()} - {f"{name}.json" for name in files}
    assert about >= {"evaluation.yaml", "prompts.yaml", "versions.yaml", "run_settings.jsonl"}

    from plain_spec_model import PlainSpecModel

    from rayembed.config.evaluation import ModelUnderTest
    from rayembed.evaluation.run_scores import make_spec

    plain = PlainSpecModel(make_spec(ModelUnderTest(reference=str(model), dtype="float32")))
    for name in SERVED:
        scores = json.loads((place / f"{name}.json").read_text())["scores"]
        expected = result_of(plain, MtebTask(name).load())
        assert largest_difference(expected.to_dict()["scores"], scores) < 1.01e-6, name

    kept = {path: path.read_bytes() for path in place.glob("*.json")}
    again = run(*asked, storage=tmp_path)
    assert again.returncode == 1
    assert "6 of 7 tasks are scored already" in again.stderr
    assert {path: path.read_bytes() for path in kept} == kept

    import mlflow

    runs = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").search_runs(["1"])
    assert len(runs) == 1
    # A model of 20 tokens cuts texts of some tasks, which has curves of its own.
    curves = {name for name in runs[0].data.metrics if not name.startswith("cut_")}
    assert curves == {f"score/{name}" for name in (*SERVED, "Shop")}


def test_an_evaluation_that_is_killed_is_one_run_with_all_scores(model, own_set, tmp_path):
    import mlflow

    names = ("First", "Second", "Third")
    words = [f"--set=placement.storage_path={tmp_path / 'out'}", "--set=model.dtype=float32"]
    words += ["--baselines=none", *(f"--own-set={name}={own_set}" for name in names)]

    def run_until(moment):
        killed = str(ROOT / "tests" / "support" / "killed_evaluation.py")
        command = [sys.executable, killed, moment, "--model", str(model), *words]
        more = {"PYTHONPATH": str(ROOT / "platform"), "RAYEMBED_CACHE": str(tmp_path / "cache")}
        done = prepared.run(command, env={**os.environ, **more}, timeout=400)
        files = (tmp_path / "out" / "evaluation" / "results").rglob("*.json")
        found = {path.stem: path.read_bytes() for path in files if path.stem in names}
        return done, found

    done, two = run_until("result-2")
    assert done.returncode == -signal.SIGKILL
    assert len(two) == 2
    assert not (tmp_path / "out" / "mlflow.db").exists(), "nobody has been told"
    done, all_of_them = run_until("sent")
    assert done.returncode == -signal.SIGKILL
    assert "2 of 3 tasks are scored already" in done.stderr
    assert all_of_them.keys() == set(names)
    assert two.items() <= all_of_them.items(), "what was scored was not done again"

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'out' / 'mlflow.db'}")
    (killed,) = client.search_runs(["1"])
    assert killed.info.status == "RUNNING", "the control: it was in the middle"
    done, scored = run_until("never")
    assert done.returncode == 0, done.stderr
    assert scored == all_of_them
    (tracked,) = client.search_runs(["1"])
    assert tracked.info.run_id == killed.info.run_id
    assert tracked.info.status == "FINISHED"
    assert tracked.data.metrics.keys() == {f"score/{name}" for name in names}
    for name in names:
        (point,) = client.get_metric_history(tracked.info.run_id, f"score/{name}")
        (of_split,) = json.loads(scored[name])["scores"]["test"]
        assert point.value == pytest.approx(of_split["main_score"], abs=1e-6)
    kept = {file.path for file in client.list_artifacts(tracked.info.run_id)}
    assert kept >= {"results", "provenance.json"}


@pytest.mark.parametrize("early", [True, False])
def test_scores_are_shown_when_mlflow_has_gone(
    model, own_set, tmp_path, monkeypatch, capsys, early
):
    def gone(*_):
        if early:
            raise TrackingError("no MLflow server at http://made.up")
        return False  # it went while it was told

    monkeypatch.setattr("rayembed.pipeline.evaluate.job.track", gone)
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    asked = ["--model", str(model), "--own-set", f"Shop={own_set}"]
    asked += ["--set", f"placement.storage_path={tmp_path / 'out'}"]
    assert run_evaluation_job(asked, about=None) == 1
    told = capsys.readouterr()
    assert ("no MLflow server at http://made.up" in told.err) == early
    assert "ndcg_at_10" in told.out
    assert "run the same command again to send the rest" in told.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tasks", "NFCorpos"), "did you mean 'NFCorpus'"),
        (("--benchmark", "BEIRR"), "did you mean 'BEIR'"),
        ((), "nothing to score the model on"),
        (("--tasks", "NFCorpus", "--languages", "xyz"), "none of the named tasks has the language"),
        (("--tasks", "NFCorpus", "--set", "placement.worker=2"), "no setting 'placement.worker'"),
        (("--own-set", "/nothing/there"), "/nothing/there"),
        (("--benchmark", "NanoBIER"), "no benchmark 'NanoBIER'; did you mean 'NanoBEIR'?"),
        (("--benchmark", "nothing like it"), ", NanoBEIR, "),
        (("--own-set", __file__), "is a file; expected a folder with corpus, queries and qrels"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_starts(model, arguments, said, capsys):
    for more in ((), ("--dry-run",)):
        code = run_evaluation_job(["--model", str(model), *arguments, *more], about=None)
        assert code in {1, 2}
        told = capsys.readouterr()
        assert said in told.err
        assert told.out == ""


def test_models_that_are_not_there_or_not_whole_are_refused(tmp_path, model, capsys):
    asked = ["--tasks", "NFCorpus", "--set", f"placement.storage_path={tmp_path / 'out'}"]
    assert run_evaluation_job(["--model", str(tmp_path / "none"), *asked], about=None) == 1
    assert "none" in capsys.readouterr().err
    import shutil

    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    assert run_evaluation_job(["--model", str(broken), *asked], about=None) == 1
    assert "no weights" in capsys.readouterr().err


def test_two_evaluations_do_not_write_into_one_folder(tmp_path, model):
    from rayembed.config.evaluation import ModelUnderTest
    from rayembed.errors import ArtifactError
    from rayembed.evaluation.run_scores import make_spec
    from rayembed.results.writer import open_results

    meta = make_spec(ModelUnderTest(reference=str(model))).meta
    with (
        open_results(tmp_path, meta),
        pytest.raises(ArtifactError, match="another evaluation writes the results"),
        open_results(tmp_path, meta),
    ):
        pass


def test_a_dry_run_is_read_back_as_it_was(model, tmp_path, capsys):
    asked = ["--model", str(model), "--tasks", "NFCorpus", "--dry-run"]
    assert run_evaluation_job(asked, about=None) == 0
    said = capsys.readouterr()
    assert "1 tasks, about" in said.err
    (tmp_path / "evaluation.yaml").write_text(said.out)
    again = ["--recipe", str(tmp_path / "evaluation.yaml"), "--dry-run"]
    assert run_evaluation_job(again, about=None) == 0
    assert capsys.readouterr().out == said.out


def test_a_dry_run_knows_own_sets_and_the_registry_as_the_evaluation_does(
    model, own_set, tmp_path, capsys
):
    storage = f"placement.storage_path={tmp_path}"
    asked = ["--own-set", f"Shop={own_set}", "--set", storage, "--dry-run"]
    prompts = ["--set", "model.prompts.instructions={Shop: Find what the customer wants}"]
    nvembed = ["--set", "model.prompts.table=nvembed"]
    assert run_evaluation_job(["--model", str(model), *asked, *nvembed, *prompts], about=None) == 0
    assert "Find what the customer wants" in capsys.readouterr().err
    assert run_evaluation_job(["--model", "models:/none@champion", *asked], about=None) == 1
    assert str(tmp_path) in capsys.readouterr().err
