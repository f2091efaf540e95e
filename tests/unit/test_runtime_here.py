"""A run in this process, without Ray: when it is chosen, stopped, scored and given much to do."""

import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from own_pairs import own_run
from s3_server import BUCKET, s3_server
from sent_work import children
from squares import square
from tiny_models import save_encoder

from rayembed.assets.storage import list_files, read_bytes, upload_folder
from rayembed.config.data_run import TeacherPlacement, data_of
from rayembed.config.evaluation import EvaluationPlacement
from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.data.engine import here as data_here
from rayembed.data.engine.here import execute_here
from rayembed.data.prepare import prepare
from rayembed.errors import ConfigError, DataError, PlacementError, StorageError
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.pipeline.run.runtime import Here, runtime_of
from rayembed.pipeline.stopping import hearing
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.training import here as training_here
from rayembed.training.checkpoints.checkpoint_list import listed_checkpoints
from rayembed.training.here import train_here
from rayembed.training.job import StageJob
from rayembed.training.trainer import Callback
from rayembed.training.validation.scoring import Validation

STEPS = 12
DROPOUT = "model.backbone.hidden_dropout=0.3"


@pytest.mark.parametrize(
    ("placement", "address", "expected"),
    [
        (Placement(), None, Here),
        (Placement(), "auto", OnRay),
        (Placement(runtime="local"), "auto", Here),
        (Placement(runtime="ray"), None, OnRay),
        (Placement(workers=2), None, OnRay),
        (Placement(step_processes=1), None, Here),
        (EvaluationPlacement(), None, Here),
        (EvaluationPlacement(workers=2), None, OnRay),
        (TeacherPlacement(), None, Here),
        (TeacherPlacement(gpus=2), None, OnRay),
    ],
)
def test_one_worker_without_a_cluster_needs_no_ray(placement, address, expected, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert type(runtime_of(placement)) is expected


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (Placement, {"workers": 2}, "placement.workers=2"),
        (Placement, {"validation_minutes": 5}, "placement.validation_minutes=5"),
        (EvaluationPlacement, {"tasks_at_once": 2}, "placement.tasks_at_once=2"),
        (TeacherPlacement, {"gpus": 1}, "placement.gpus=1"),
    ],
)
def test_what_one_process_cannot_give_is_refused(kind, settings, named):
    with pytest.raises(ConfigError, match=named):
        parse(kind, {"runtime": "local", **settings})


def test_a_gpu_that_is_not_here_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(PlacementError, match="no node has a GPU"):
        Here().check_now(Placement(use_gpu=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and the folder of its stage's plan."""
    folder = tmp_path_factory.mktemp("here")
    settings = f"stages.finetune.steps={STEPS}", "stages.finetune.checkpoint_every_steps=5"
    run = own_run(folder, *settings, DROPOUT, "data.datasets.pairs.held_out=null")
    return run, prepare(run, Here().data_context(data_of(run)))["finetune"]


def train(made, place: Path, *callbacks, validation=None, run=None):
    """Weights of the stage, and the number of each step that was done."""
    place.mkdir(exist_ok=True)
    weights = place / "weights.safetensors"
    validated_in = None if validation is None else str(place)
    given = {"validated_in": validated_in, "callbacks": callbacks}
    job = StageJob(run or made[0], 0, made[1], None, str(weights), **given)
    train_here(job, str(place), place / METRICS_FILE, 0, validation=validation)
    steps = [record["step"] for record in MetricsLog(place / METRICS_FILE).records()]
    return safetensors.torch.load_file(weights), steps


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    return train(made, tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture(autouse=True)
def handlers():
    """Python's own for SIGINT, which xdist ignores, and SIGHUP's, which `nohup` does; all are put
    back, as those that heard stay.
    """
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    former = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def equal(found, expected):
    return all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_batches_made_by_processes_give_the_same_weights(made, whole, tmp_path):
    run = override(made[0], ["placement.step_processes=2"])
    seen = []

    class Children(Callback):
        def on_step_end(self, record):
            seen.append(children())

    weights, steps = train(made, tmp_path / "processes", Children(), run=run)
    assert steps == [*range(1, STEPS + 1)]
    assert equal(weights, whole)
    assert len(seen[0]) == 2
    assert not children()


def test_deterministic_operations_are_all_there_on_cpus_and_give_the_same_weights(
    made, whole, tmp_path
):
    run = override(made[0], ["placement.deterministic=true"])
    assert equal(train(made, tmp_path / "run", run=run)[0], whole)


class Interrupts(Callback):
    """Sends a signal to this process after a step, so many times."""

    def __init__(self, step: int, number: int, times: int = 1):
        self.at, self.number, self.times = step, number, times

    def on_step_end(self, record):
        if record["step"] == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGHUP, 2)]
)
def test_an_interrupted_training_makes_a_checkpoint_and_goes_on_bit_for_bit(
    made, whole, tmp_path, number, times
):
    """A terminal that is closed sends its signal twice."""
    with hearing() as heard, pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "run", Interrupts(7, number, times))
    assert heard.number == number
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "train").glob("step-*"))
    assert checkpoints == ["step-0000005", "step-0000007"]
    found, steps = train(made, tmp_path / "run")
    assert steps == list(range(1, STEPS + 1))
    assert equal(found, whole)


# ZeRO-3's hooks on modules stay, and one process has nothing to partition.
@pytest.mark.parametrize("zero_stage", range(3))
def test_a_training_leaves_nothing_in_memory_whether_it_ends_or_is_stopped(
    made, tmp_path, zero_stage
):
    run = override(made[0], [f"placement.zero_stage={zero_stage}"])
    held = []

    class Holds(Callback):
        def on_train_start(self, trainer, step):
            held.extend(weakref.ref(p) for p in trainer.model.parameters())
            held.append(weakref.ref(trainer.engine))

    with hearing(), pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "run", Holds(), Interrupts(7, signal.SIGINT), run=run)
    train(made, tmp_path / "run", Holds(), run=run)
    gc.collect()
    assert len(held) > 10
    assert not [ref() for ref in held if ref() is not None]


def test_a_stage_with_a_teacher_trains_a_projection_and_goes_on_bit_for_bit(made, tmp_path):
    """The teacher is twice as wide as the model, whose false negatives it tells too."""
    save_encoder(tmp_path / "teacher", hidden_size=64)
    teachers = f"[{{teacher: {tmp_path}/teacher, max_length: 16}}]"
    loss = "{kind: vector_distillation, false_negatives: {by: teachers}}"
    settings = [f"stages.finetune.teachers={teachers}", f"stages.finetune.loss={loss}"]
    run = override(made[0], settings)
    taught = run, prepare(run, Here().data_context(data_of(run)))["finetune"]
    straight, _ = train(taught, tmp_path / "straight")
    with hearing(), pytest.raises(KeyboardInterrupt):
        train(taught, tmp_path / "run", Interrupts(7, signal.SIGINT))
    found, steps = train(taught, tmp_path / "run")
    assert steps == list(range(1, STEPS + 1))
    assert equal(found, straight)
    assert not any("projection" in name for name in found)
    states = sorted((tmp_path / "run" / "train").rglob("*.safetensors"))
    with safetensors.safe_open(states[-1], "pt") as file:
        moved = [n for n in file.keys() if "loss:projection" in n]  # noqa: SIM118
    assert moved, [str(path) for path in states]


@pytest.fixture
def uploads(monkeypatch):
    """Calls a function of the step before each upload."""

    def before(act):
        def upload(folder, place):
            act(int(place.rpartition("-")[2]))
            upload_folder(folder, place)

        monkeypatch.setattr(training_here, "upload_folder", upload)

    return before


def test_training_goes_on_while_a_checkpoint_is_stored(made, whole, tmp_path, uploads):
    went_on = threading.Event()
    waited = []

    class Looks(Callback):
        def on_step_end(self, record):
            if record["step"] == 7:
                went_on.set()

    uploads(lambda step: waited.append((step, went_on.wait(20))))
    found, _ = train(made, tmp_path / "run", Looks())
    assert waited[0] == (5, True)  # would time out if the step had to wait
    assert [step for step, _ in waited] == [5, 10, STEPS]
    assert equal(found, whole)
    assert kept_checkpoints(tmp_path) == ["step-0000010", f"step-{STEPS:07d}"]


def kept_checkpoints(folder):
    return listed_checkpoints(str(folder / "run" / "train"))


def test_a_failed_upload_is_told_and_the_last_good_checkpoint_is_gone_on_from(
    made, whole, tmp_path, uploads
):
    def fails(step):
        if step == 10:
            raise StorageError("no answer at step 10")

    uploads(fails)
    seen = []

    class Looks(Callback):
        def on_step_end(self, record):
            seen.append(record["step"])

    with pytest.raises(StorageError, match="at step 10"):
        train(made, tmp_path / "run", Looks())
    assert 10 <= seen[-1] < STEPS
    assert kept_checkpoints(tmp_path) == ["step-0000005"]
    assert not list((tmp_path / "run").glob("weights*"))
    uploads(lambda step: None)
    seen.clear()
    found, _ = train(made, tmp_path / "run", Looks())
    assert seen[0] == 6
    assert equal(found, whole)


def test_the_end_waits_for_a_slow_upload(made, whole, tmp_path, uploads):
    """An interrupt while the checkpoint of an earlier step is on its way loses neither."""
    uploads(lambda step: time.sleep(1))
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "run", Interrupts(6, signal.SIGINT))
    assert kept_checkpoints(tmp_path) == ["step-0000005", "step-0000006"]
    found, steps = train(made, tmp_path / "run")
    assert steps == list(range(1, STEPS + 1))
    assert equal(found, whole)


def test_checkpoints_in_object_storage_are_gone_on_from(made, whole, tmp_path, monkeypatch):
    with s3_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/run"
        job = StageJob(made[0], 0, made[1], None, f"{place}/weights.safetensors")
        interrupted = replace(job, callbacks=(Interrupts(7, signal.SIGINT),))
        with pytest.raises(KeyboardInterrupt):
            train_here(interrupted, place, tmp_path / METRICS_FILE, 0)
        assert f"train/step-{7:07d}/position.json" in list_files(place, recursive=True)
        train_here(job, place, tmp_path / METRICS_FILE, 0)
        assert equal(safetensors.torch.load(read_bytes(job.weights)), whole)


def test_without_the_random_state_of_its_checkpoint_it_would_differ(
    made, whole, tmp_path, monkeypatch
):
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "run", Interrupts(7, signal.SIGINT))
    monkeypatch.setattr("rayembed.training.checkpoints.checkpoint.restore", lambda state: None)
    assert not equal(train(made, tmp_path / "run")[0], whole)


def test_a_second_interrupt_ends_at_once(made, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "run", Interrupts(7, signal.SIGINT, times=2))
    assert not (tmp_path / "run" / "train" / "step-0000007").exists()


def test_the_process_is_as_before(made, tmp_path, monkeypatch):
    """What trains in it next, or is started by it, must not take itself for a worker."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def state():
        return signal.getsignal(signal.SIGINT), torch.get_num_threads(), dict(os.environ)

    before = state()
    train(made, tmp_path / "run")
    assert before == state()


class Scores:
    """Scores by step; it draws random numbers, as mteb's tasks do."""

    def __init__(self, scores):
        self.scores, self.asked = scores, []

    def __call__(self, run, weights, device):
        torch.manual_seed(99)
        self.asked.append(int(Path(weights).stem.removeprefix("step-")))
        if self.asked[-1] not in self.scores:
            raise DataError("these texts cannot be scored")
        return {"task": self.scores[self.asked[-1]]}


def validated(made, **changes):
    data = {"kind": "beir", "path": "judged"}
    values = made[0].model_dump(mode="json")
    values["evaluation"]["validation"] = {"data": data, "every_steps": 3, **changes}
    return parse(type(made[0]), values)


def validation(scores, told):
    return Validation(scores, "data", lambda by_task: by_task["task"], told.append)


def test_the_best_scored_weights_are_handed_on_and_scoring_changes_no_training(made, tmp_path):
    scores, told = Scores({3: 0.1, 6: 0.5, 12: 0.4}), []
    run = validated(made)
    best, _ = train(made, tmp_path / "run", run=run, validation=validation(scores, told))
    assert scores.asked == [3, 6, 9, 12], "and a score that cannot be had stops nothing"
    assert [record.step for record in told] == [3, 6, 12]
    last_run = validated(made, keep="last")
    given = {"run": last_run, "validation": validation(Scores({3: 0.1}), [])}
    last, _ = train(made, tmp_path / "last", **given)
    plain = train(made, tmp_path / "plain", run=replace_validation(last_run))[0]
    assert equal(last, plain)
    assert not equal(best, last)


def replace_validation(run):
    values = run.model_dump(mode="json")
    values["evaluation"]["validation"] = None
    return parse(type(run), values)


def test_scores_end_a_stage_early(made, tmp_path):
    scores = Scores({3: 0.5, 6: 0.4, 9: 0.3, 12: 0.9})
    run = validated(made, early_stopping={"patience": 1})
    _, steps = train(made, tmp_path / "run", run=run, validation=validation(scores, []))
    assert steps[-1] < STEPS
    assert 12 not in scores.asked


def test_much_work_is_shared_by_a_pool_in_the_same_order(monkeypatch):
    alone = list(execute_here(square, range(6)))
    assert {result["process"] for result in alone} == {os.getpid()}
    monkeypatch.setattr(data_here, "_SECONDS_ALONE", 0.0)
    monkeypatch.setattr(data_here, "num_cores", lambda: 2)
    shared = list(execute_here(square, range(6)))
    assert [r["value"] for r in shared] == [r["value"] for r in alone]
    assert os.getpid() not in {result["process"] for result in shared}
    with pytest.raises(DataError, match="13 is refused"):
        list(execute_here(square, [1, 13, 2]))


def test_a_worker_of_a_group_is_refused(made, tmp_path, monkeypatch):
    monkeypatch.setattr(training_here.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(training_here.dist, "get_world_size", lambda: 2)
    with pytest.raises(PlacementError, match="is one of 2 of a"):
        train(made, tmp_path / "run")
