"""Checkpoints go when a run is done, and a job lists and frees what lies in a storage."""

import itertools
import json
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock
from mlflow import MlflowClient
from own_pairs import own_run
from s3_server import BUCKET, s3_server

from rayembed.assets import store
from rayembed.assets.json_files import write_json
from rayembed.assets.lease import Lease
from rayembed.assets.storage import list_files, upload_folder
from rayembed.config.data_run import data_of
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.data.prepare import prepare
from rayembed.data.vectors.lookup import KIND
from rayembed.pipeline.run import train as train_module
from rayembed.pipeline.run.folders import RunFolders
from rayembed.pipeline.run.runtime import Here
from rayembed.registry import run_folder, tracking
from rayembed.training.checkpoints import checkpoint_list, export
from rayembed.training.trainer import StageTrainer
from rayembed_extras.clean_runs import contents, inventory, removal
from rayembed_extras.clean_runs.job import run_clean_job
from rayembed_extras.sweeps import sweep as sweep_module
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.trial_store import TrialRecord, TrialStore

pytestmark = pytest.mark.job

QUICK = (
    "stages.finetune.checkpoint_every_steps=2",
    "evaluation.before_training=false",
    "evaluation.baselines=[]",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Storage of a run that is done and registered, and keeps its checkpoints; its result."""
    folder = tmp_path_factory.mktemp("clean")
    outcome = train_module.train(own_run(folder, *QUICK, "placement.keep_states=true"))
    return folder / "outputs", outcome


@pytest.fixture
def storage(trained, tmp_path):
    """A copy of the storage; MLflow's files are those of the original."""
    aside = shutil.ignore_patterns("mlflow_artifacts")
    shutil.copytree(trained[0], tmp_path / "outputs", ignore=aside)
    return tmp_path / "outputs"


@pytest.fixture
def run(trained, storage):
    """The run in the copy of the storage, whose checkpoints may go."""
    return own_run(trained[0].parent, *QUICK, f"placement.storage_path={storage}")


def clean(capsys, storage: Path | str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the job."""
    capsys.readouterr()
    code = run_clean_job(["--storage-path", str(storage), *arguments])
    return code, *capsys.readouterr()


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def checkpoints(storage: Path) -> list[str]:
    return sorted(path.name for path in storage.glob("runs/own/finetune/train/step-*"))


class Killed(BaseException):
    """Ends what runs, as nothing in it expects."""


def killed(*_, **__):
    raise Killed


@contextmanager
def killed_at_its_end(_):
    yield
    raise Killed


def closed_midway(tracker: tracking.Tracker, _: str) -> None:
    """The end of a tracker that is killed when its thread has ended."""
    tracker._stop.set()
    assert tracker._thread is not None
    tracker._thread.join()
    raise Killed


def half_removed(folder: str) -> None:
    """The removal of a folder that is killed after its first file."""
    next(path for path in sorted(Path(folder).rglob("*")) if path.is_file()).unlink()
    raise Killed


POINTS = [
    (train_module, "register_trained", killed),
    (train_module, "Outcome", killed),
    (tracking.Tracker, "close", closed_midway),
    (RunFolders, "kept", killed_at_its_end),
    (train_module, "remove_states", killed),
    (checkpoint_list, "remove_folder", half_removed),
]


def test_checkpoints_go_when_all_else_is_in_storage_and_the_run_is_found_done(
    trained, storage, run, monkeypatch
):
    monkeypatch.setattr(StageTrainer, "fit", killed)  # nothing is trained again
    for where, name, end in POINTS:
        assert checkpoints(storage) == ["step-0000002", "step-0000004"], name
        with monkeypatch.context() as here:
            here.setattr(where, name, end)
            with pytest.raises(Killed):
                train_module.train(run)
    assert (storage / "runs/own/finetune/train").exists()
    before = {name for name in files(storage / "runs") if "/train/" not in name}
    for _ in range(2):
        outcome = train_module.train(run)
        assert outcome.version == trained[1].version
        assert outcome.table.rows == trained[1].table.rows
        assert not (storage / "runs/own/finetune/train").exists()
    assert before <= files(storage / "runs").keys()


def test_a_run_that_is_not_done_keeps_its_checkpoints_and_goes_on(storage, run, monkeypatch):
    (storage / "runs/own/finetune/weights.safetensors").unlink()
    shutil.rmtree(storage / "runs/own/finetune/train/step-0000004")
    with monkeypatch.context() as here:
        here.setattr(StageTrainer, "fit", killed)
        with pytest.raises(Killed):
            train_module.train(run)
    assert checkpoints(storage) == ["step-0000002"]
    train_module.train(run)
    steps = [json.loads(x)["step"] for x in (storage / "runs/own/metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4]
    assert not (storage / "runs/own/finetune/train").exists()


def test_the_list_tells_runs_parts_data_and_what_can_be_freed(storage, capsys):
    (storage / "runs/theirs").mkdir()
    (storage / "runs/theirs/notes.txt").write_text("mine")
    code, out, _ = clean(capsys, storage)
    assert code == 0
    row = next(line.split() for line in out.splitlines() if line.startswith("own "))
    sizes = {path: len(content) for path, content in files(storage).items()}
    states = sum(n for path, n in sizes.items() if path.startswith("runs/own/finetune/train/"))
    assert row[1] == "done"
    assert f"{states / 1e3:.1f} kB" in " ".join(row)
    records = next(storage.glob("data/records/*"))
    line = next(line for line in out.splitlines() if f"data/records/{records.name}" in line)
    assert line.split()[-1] == "own"
    assert "runs/theirs" in out
    assert "To free" not in out, "its checkpoints are kept by its settings, all else is used"


def test_checkpoints_are_freed_of_runs_that_are_done_and_do_not_keep_them(storage, capsys):
    code, out, _ = clean(capsys, storage, "--free", "states")
    assert (code, "nothing to remove" in out) == (0, True)
    kept = files(storage)
    code, out, _ = clean(capsys, storage, "--free", "states", "--run", "own", "--dry-run")
    assert code == 0
    assert "would go" in out
    assert files(storage) == kept
    settings = storage / "runs/own/run.yaml"
    settings.write_text(settings.read_text().replace("keep_states: 'true'", "keep_states: 'false'"))
    settings.write_text(settings.read_text().replace("keep_states: true", "keep_states: false"))
    code, out, _ = clean(capsys, storage, "--free", "states")
    assert (code, "free again" in out) == (0, True)
    states = {name for name in kept if "/finetune/train/" in name}
    assert states
    assert files(storage).keys() == kept.keys() - states


def test_a_run_that_was_interrupted_keeps_what_it_goes_on_from(storage, capsys):
    outbox = storage / "runs/own/mlflow_outbox.jsonl"
    outbox.write_text(outbox.read_text().replace('"FINISHED"', '"KILLED"'))
    kept = files(storage)
    code, _, err = clean(capsys, storage, "--free", "states", "--run", "own")
    assert code == 1
    assert "the run 'own' is interrupted, and needs its checkpoints to resume" in err
    assert clean(capsys, storage, "--free", "states")[0] == 0
    assert files(storage) == kept
    assert " interrupted " in clean(capsys, storage)[1]


@pytest.mark.parametrize("part", ["states", "folder", "run", "data"])
def test_nothing_goes_while_a_job_has_the_run(storage, capsys, part):
    named = [] if part == "data" else ["--run", "own"]
    with Lease(str(storage / "leases/runs/own"), "trains", "here"):
        code, _, err = clean(capsys, storage, "--free", part, *named)
        assert " running " in clean(capsys, storage)[1]
    assert code == 1
    assert "running" in err or "right now" in err or "at work" in err
    assert checkpoints(storage)


@pytest.mark.parametrize("part", ["states", "folder"])
def test_nothing_goes_where_a_job_takes_the_run_after_it_was_looked_at(storage, capsys, part):
    with FileLock(storage / "runs/own.lock"):
        code, _, err = clean(capsys, storage, "--free", part, "--run", "own")
    assert (code, "another job works on the run 'own'" in err) == (1, True)
    assert checkpoints(storage)


REFUSED = [
    (["--free", "run"], "needs the names of runs"),
    (["--free", "folder"], "needs the names of runs"),
    (["--free", "run", "--free", "folder", "--run", "own"], "give only one of the two"),
    (["--free", "data", "--run", "own"], "--run has no effect with --free data"),
    (["--delete-versions"], "--delete-versions needs --free run"),
    (["--run", "owns"], "did you mean 'own'"),
    (["--run", "theirs", "--free", "folder"], "no run or sweep of that name that rayembed made"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_options_that_do_not_go_together_are_refused(storage, capsys, arguments, message):
    (storage / "runs/theirs").mkdir()
    (storage / "runs/theirs/run.txt").write_text("")
    kept = files(storage)
    code, _, err = clean(capsys, storage, *arguments)
    assert (code, message in err) == (2, True), err
    assert files(storage) == kept


def test_a_run_with_a_registered_version_stays_and_its_folder_may_go(storage, capsys):
    kept = files(storage)
    code, _, err = clean(capsys, storage, "--free", "run", "--run", "own")
    assert code == 1
    assert "version 1 of own @candidate" in err
    assert files(storage) == kept
    outbox = storage / "runs/own/mlflow_outbox.taken"
    outbox.write_text("1")
    code, _, err = clean(capsys, storage, "--free", "folder", "--run", "own")
    assert (code, "--send-metrics" in err) == (1, True)
    outbox.write_bytes(kept["runs/own/mlflow_outbox.taken"])
    code, out, _ = clean(capsys, storage, "--free", "folder", "--free", "data", "--run", "own")
    assert code == 0, out
    assert set(files(storage)) == {"mlflow.db", *(n for n in kept if n.startswith("mlflow_"))}


NAMED = ("model.backbone.path", "data.datasets.pairs.mining.teacher")


def naming(run, setting: str, reference: str) -> str:
    """Settings of a second run that names a model."""
    negatives = 7 if "mining" in setting else 0
    taken = f"stages.finetune.batch.num_negatives={negatives}"
    return override(run, ["name=second", f"{setting}={reference}", taken]).to_yaml()


def test_a_run_that_another_one_names_stays(storage, run, capsys):
    model, other_way = storage / "runs/own/models/finetune", storage.parent / "latest/of"
    other_way.parent.mkdir()
    other_way.symlink_to(model)
    (storage / "runs/second").mkdir()
    ways = [model, "runs/own/models/finetune", "../x/runs/./own//models/finetune", other_way]
    for setting in NAMED:
        for way in ways:
            text = naming(run, setting, str(way))
            (storage / "runs/second/run.yaml").write_text(text)
            code, _, err = clean(capsys, storage, "--free", "folder", "--run", "own")
            assert code == 1, way
            assert (
                "the run 'own' cannot be removed: 'second' of this storage use one of its models"
                in err
            )
            assert model.exists()
    code, _, err = clean(capsys, storage, "--free", "data")
    assert (code, "'second' does not record which data it uses" in err) == (1, True)
    both = ("--run", "own", "--run", "second")
    assert clean(capsys, storage, "--free", "folder", *both)[0] == 0
    assert not list(storage.glob("runs/*/*"))


@pytest.mark.parametrize("end", ["@candidate", "/1"])
def test_a_version_that_a_run_names_stays_with_its_run(storage, run, capsys, end):
    arguments = ("--free", "run", "--run", "own", "--delete-versions")
    (storage / "runs/second").mkdir()
    settings = storage / "runs/second/run.yaml"
    for setting in NAMED:
        settings.write_text(naming(run, setting, f"models:/own{end}"))
        kept = files(storage)
        code, _, err = clean(capsys, storage, *arguments)
        told = "'own' cannot be removed: 'second' of this storage use its model version 1 of own @c"
        assert (code, told in err) == (1, True), err
        assert files(storage) == kept
    for elsewhere in (f"models:/own{end}0", f"models:/owner{end}", f"models:/my-own{end}"):
        settings.write_text(naming(run, "model.backbone.path", elsewhere))
        assert clean(capsys, storage, *arguments, "--dry-run")[0] == 0
    settings.write_text(settings.read_text().replace("models:/my-own", "models:/own"))
    assert clean(capsys, storage, "--free", "folder", "--run", "own", "--dry-run")[0] == 0


def test_a_sweep_goes_with_its_trials_and_a_trial_not_before_its_sweep_is_done(
    storage, run, capsys
):
    values = {
        "name": "s",
        "runs": {"": run.model_dump(mode="json")},
        "space": {"seed": "choice(0, 1)"},
    }
    sweep = storage / "sweeps/s"
    sweep.mkdir(parents=True)
    (sweep / sweep_module.SWEEP_FILE).write_text(parse(Sweep, values).to_yaml())
    TrialStore(str(sweep)).write(TrialRecord("own", "", {"seed": "0"}, state="stopped"))
    outbox = storage / "runs/own/mlflow_outbox.jsonl"
    outbox.write_text(outbox.read_text().replace('"FINISHED"', '"KILLED"'))
    rows = [line.split()[:2] for line in clean(capsys, storage)[1].splitlines()]
    assert ["own", "stopped"] in rows
    code, _, err = clean(capsys, storage, "--free", "folder", "--run", "own")
    assert (
        code,
        "'own' cannot be removed: it is a trial of the sweep 's', which is interrupted" in err,
    ) == (1, True)
    assert clean(capsys, storage, "--free", "states", "--run", "s")[0] == 0
    assert checkpoints(storage) == []
    assert (storage / "runs/own/run.yaml").exists()
    code, _, err = clean(capsys, storage, "--free", "folder", "--run", "s")
    assert code == 0, err
    assert not (storage / "runs/own").exists()
    assert not sweep.exists()


def make_old(storage: Path) -> None:
    """Have all prepared data written before the last day."""
    old = time.time() - 2 * inventory.NEW_SECONDS
    for path in storage.rglob("*"):
        if path.relative_to(storage).parts[0] in ("data", "plans"):
            os.utime(path, (old, old))


def test_data_that_was_just_made_is_left_for_the_run_that_is_about_to_start(storage, capsys):
    vectors = make_vectors(storage)
    make_old(storage)
    shutil.rmtree(storage / "runs/own")
    plan, others = next(storage.glob("plans/*/")), storage / "data/records/pairs-bbbbbbbbbbbb"
    records = next(storage.glob("data/records/*"))
    shutil.copytree(records, others)
    text = (others / "manifest.json").read_text().replace(records.name[-12:], "b" * 12)
    (others / "manifest.json").write_text(text)
    made, gone = files(storage).keys(), str(vectors["gone"].relative_to(storage))
    os.utime(plan / "manifest.json")
    out = clean(capsys, storage)[1]
    for place in (plan, records, others):
        line = next(line for line in out.splitlines() if place.name in line)
        assert line.rstrip().endswith("no run yet"), "new, or what a new plan was made of"
    assert "those of other storages are not known" in out
    assert clean(capsys, storage, "--free", "data")[0] == 0
    assert files(storage).keys() == made - {gone}
    vectors["gone"].write_bytes(b"new")
    make_old(storage)
    os.utime(vectors["gone"])
    assert clean(capsys, storage, "--free", "data")[0] == 0
    left = [name for name in files(storage) if name.startswith(("data/", "plans/"))]
    assert sorted(left) == sorted([gone, str(vectors["note"].relative_to(storage))])


def make_vectors(storage: Path) -> dict[str, Path]:
    """Teachers' vectors of the run's part, of a part that is gone, and of a stage's negatives."""
    vectors = storage / "data/vectors/teacher-software"
    vectors.mkdir(parents=True)
    part = next(storage.glob("data/records/*/manifest.json"))
    name, _ = json.loads(part.read_text())["parts"][0]
    digest = name.removeprefix("part-").removesuffix(".parquet")
    made = {
        "used": vectors / f"{digest}.queries.npy",
        "gone": vectors / f"{'0' * 32}.queries.npy",
        "pointed": vectors / f"{'1' * 32}.further-document-12.npy",
        "note": vectors.with_name("teacher.json"),
    }
    for path in made.values():
        path.write_bytes(b"vectors")
    plan = next(storage.glob("plans/*/manifest.json"))
    store = storage / "data" / KIND / "finetune-aaaaaaaaaaaa"
    store.mkdir(parents=True)
    told = [f"vectors/{vectors.name}/{made['pointed'].name}", 7]
    write_json(
        str(store / "manifest.json"),
        {"fingerprint": "aaaaaaaaaaaa", "parts": [], "files": {"query": [], "document": [told]}},
    )
    values = json.loads(plan.read_text())
    plan.write_text(json.dumps({**values, "teachers": [store.name]}))
    return made


def test_data_that_no_run_uses_goes_and_all_that_one_leads_to_stays(storage, capsys):
    vectors = make_vectors(storage)
    records = next(storage.glob("data/records/*"))
    kept = files(storage)
    unused = records.with_name("pairs-bbbbbbbbbbbb")
    shutil.copytree(records, unused)
    manifest = (unused / "manifest.json").read_text().replace(records.name[-12:], "b" * 12)
    (unused / "manifest.json").write_text(manifest)
    unfinished = records.with_name("pairs-cccccccccccc")
    (unfinished / "units").mkdir(parents=True)
    (unfinished / "units/one.json").write_text("{}")
    code, _, err = clean(capsys, storage, "--free", "data")
    assert code == 1, "a job seems to make it"
    assert "running in this storage ('data/records/pairs-cccccccccccc')" in err
    old = time.time() - 2 * inventory.STALE_SECONDS
    os.utime(unfinished / "units/one.json", (old, old))
    assert "nothing to remove" in clean(capsys, storage, "--free", "data")[1]
    make_old(storage)
    out = clean(capsys, storage, "--free", "data", "--dry-run")[1]
    assert out.count("would go") == 2, out
    assert clean(capsys, storage, "--free", "data")[0] == 0
    gone = str(vectors["gone"].relative_to(storage))
    left = str((unfinished / "units/one.json").relative_to(storage))
    assert files(storage).keys() == (kept.keys() | {left}) - {gone}


def cut(monkeypatch, number: int) -> None:
    """End the removal before its operation of that number."""
    counted = itertools.count()
    for name in ("write_atomic", "remove_file", "remove_folder"):
        done = getattr(removal, name)

        def operation(*given, done=done):
            if next(counted) == number:
                raise Killed
            done(*given)

        monkeypatch.setattr(removal, name, operation)


def ends(capsys, storage: Path, number: int, *arguments: str) -> bool:
    """Whether a job that is killed before its operation of that number was done before."""
    with pytest.MonkeyPatch.context() as here:
        cut(here, number)
        try:
            assert clean(capsys, storage, *arguments)[0] == 0
        except Killed:
            return False
    return True


def half_of(done):
    """A removal of a folder that is killed in its middle."""

    def half(folder):
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        for path in paths[: (len(paths) + 1) // 2]:
            path.unlink()
        done(folder) if not paths else killed()

    return half


def test_data_whose_removal_is_killed_is_made_again_and_its_rest_goes(
    storage, run, capsys, tmp_path
):
    whole = {
        name: content
        for name, content in files(storage).items()
        if "/parts/" in name and "/converted/" not in name  # which is made where it is needed
    }
    shutil.rmtree(storage / "runs/own")
    make_old(storage)
    again = tmp_path / "again"
    placement = run.placement.model_copy(update={"storage_path": str(again)})
    moved = run.model_copy(update={"placement": placement})
    for number in range(100):
        for kill in ("before", "amid"):
            shutil.rmtree(again, ignore_errors=True)
            shutil.copytree(storage, again)
            with pytest.MonkeyPatch.context() as here:
                if kill == "amid":
                    here.setattr(removal, "remove_folder", half_of(removal.remove_folder))
                if ends(capsys, again, number, "--free", "data"):
                    break
            prepare(moved, Here().data_context(data_of(moved)))
            made = {name: content for name, content in files(again).items() if "/parts/" in name}
            assert made.items() >= whole.items(), (number, kill)
            make_old(again)
            assert clean(capsys, again, "--free", "data")[0] == 0
            left = [name for name in files(again) if name.startswith(("data", "plans"))]
            assert not left, (number, kill)
        else:
            continue
        break
    assert number >= 9, "three operations for each of three folders"


def test_a_run_whose_removal_is_killed_is_known_and_its_rest_goes(storage, capsys, tmp_path):
    for number in range(100):
        again = tmp_path / "again"
        shutil.copytree(storage, again)
        if ends(capsys, again, number, "--free", "folder", "--run", "own"):
            break
        model = again / "runs/own/models/finetune"
        if (model / export.MADE_OF_FILE).exists():
            assert number == 0, "a model that is known as whole lost none of its files"
        if files(again / "runs/own"):
            code, _, err = clean(capsys, again, "--free", "folder", "--run", "own")
            assert code == 0, err
        assert not files(again / "runs/own"), number
        shutil.rmtree(again)
    assert number > 5


def test_half_written_files_go_an_hour_later(storage, capsys):
    names = ["runs/own/.run.yaml.a1b2c3d4.tmp", "plans/.x.json.abcdefgh.tmp"]
    other = storage / "runs/own/mine.tmp"
    old = time.time() - 2 * inventory.STALE_SECONDS
    for path in (*(storage / name for name in names), other):
        path.write_text("half")
        os.utime(path, (old, old))
    os.utime(storage / names[1])
    code, out, _ = clean(capsys, storage, "--free", "temporary")
    assert (code, "1 half-written files" in out) == (0, True)
    assert [(storage / name).exists() for name in names] == [False, True]
    assert other.exists()


def test_object_storage_is_cleaned_as_a_disk_is(storage, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/cleaned"  # servers of one process share what their buckets hold
        for top in ("runs", "data", "plans"):
            upload_folder(storage / top, f"{place}/{top}")
        code, out, err = clean(capsys, place)
        assert (code, "own  done" in out) == (0, True), err
        assert clean(capsys, place, "--free", "states", "--run", "own")[0] == 0
        names = list_files(place, recursive=True)
        assert not [name for name in names if "/train/" in name]
        assert "runs/own/models/finetune/model.safetensors" in names
        code, _, err = clean(capsys, place, "--free", "folder", "--run", "own")
        assert code == 0, err
        monkeypatch.setattr(inventory, "NEW_SECONDS", 0.0)
        for number in itertools.count():  # each call is killed one operation later
            done = ends(capsys, place, number, "--free", "data")
            names = list_files(place, recursive=True)
            for folder in {name.rpartition("/units/")[0] for name in names if "/units/" in name}:
                below = [name for name in names if name.startswith(f"{folder}/")]
                assert any("/parts/" in name for name in below), below
            if done:
                break
        assert number > 3
        left = [n for n in list_files(place, recursive=True) if not n.endswith(".lock")]
        assert left == []
        assert not list((tmp_path / "cache/runs").glob("own-*/run.yaml"))


def test_the_names_of_files_are_those_that_other_rooms_write():
    assert contents.STATE_FOLDER == checkpoint_list.CHECKPOINTS
    assert contents.MADE_OF == export.MADE_OF_FILE
    assert contents.MANIFEST == store.MANIFEST
    assert contents.RUN_FILE == run_folder.RUN_FILE
    assert contents.SWEEP_FILE == sweep_module.SWEEP_FILE
    assert tracking.TRACKING_FILE == inventory._TRACKING
    assert sweep_module.DATA_FILE == inventory._SWEPT
    assert KIND == inventory._STORES


def test_a_whole_run_goes_with_its_entries_in_mlflow(trained, capsys):
    """The last test: it removes the run that the others copy."""
    storage, outcome = trained
    client = MlflowClient(outcome.tracking_uri, outcome.tracking_uri)
    run_id = json.loads((storage / "runs/own/mlflow.json").read_text())["run_id"]
    arguments = ("--free", "run", "--free", "data", "--run", "own", "--delete-versions")
    kept = files(storage)
    code, out, _ = clean(capsys, storage, *arguments, "--dry-run")
    assert (code, "version 1 of own @candidate" in out) == (0, True)
    assert files(storage) == kept
    with pytest.MonkeyPatch.context() as here:
        here.setattr(removal, "_remove_run", killed)  # between MLflow and the folder
        with pytest.raises(Killed):
            clean(capsys, storage, *arguments)
    code, out, err = clean(capsys, storage, *arguments)
    assert code == 0, err
    assert set(files(storage)) == {"mlflow.db"}
    assert client.search_model_versions("name = 'own'") == []
    assert client.get_run(run_id).info.lifecycle_stage == "deleted"
