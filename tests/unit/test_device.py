"""GPU or CPU: how `use_gpu` is settled and said, a process for one device, and repeatable bits."""

import logging
import sys
from types import SimpleNamespace

import pytest
import ray
import torch
import torch.distributed as dist
from own_pairs import own_run

from rayembed.config.evaluation import EvaluationPlacement, EvaluationRun
from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.errors import ConfigError, PlacementError
from rayembed.evaluation.pooled import on_ray as evaluation_on_ray
from rayembed.evaluation.pooled.pool import Workers
from rayembed.machine import gpu_check, gpu_check_on_ray
from rayembed.machine.device import (
    SeenGpus,
    allocator_environment,
    check_deterministic_start,
    deterministic,
    gpus_here,
    placed_here,
    settled_gpu,
    settled_placement,
)
from rayembed.machine.gpu_check import GpuFacts
from rayembed.pipeline.run import runtime as pipeline_here
from rayembed.pipeline.run.dry_run import auto_device, machines
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.pipeline.run.runtime import Here, runtime_of, started, with_device
from rayembed.recipes.catalogue import get_recipe
from rayembed.training import here as training_here
from rayembed.training.here import take_device

NONE, ONE = SeenGpus(0, "there is no GPU"), SeenGpus(1, "there is a GPU")


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="rayembed")
    return caplog


@pytest.fixture
def gpus(monkeypatch):
    """Lets torch see so many H100."""

    def see(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
        facts = GpuFacts("here", "2.13.0", "13.0", "580.95.05" if number else None, "NVIDIA H100")
        for module in (gpu_check, pipeline_here):
            monkeypatch.setattr(module, "gpu_facts", lambda: facts)

    return see


@pytest.fixture
def cluster(monkeypatch):
    """A cluster whose live nodes have these resources, and a dead one with GPUs."""

    def of(*nodes):
        live = [{"Alive": True, "NodeID": str(i), "Resources": n} for i, n in enumerate(nodes)]
        gone = {"Alive": False, "NodeID": "gone", "Resources": {"CPU": 8.0, "GPU": 8.0}}
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "nodes", lambda: [*live, gone])
        monkeypatch.setattr(gpu_check_on_ray, "gpu_problems", lambda gpu=None: {})
        runtime = OnRay()
        runtime.start = lambda: None
        return runtime

    return of


@pytest.mark.parametrize(
    ("asked", "seen", "expected", "level", "told"),
    [
        ("auto", ONE, True, "INFO", "placement.use_gpu=auto resolves to true: there is a GPU"),
        ("auto", NONE, False, "INFO", "placement.use_gpu=auto resolves to false: there is no GPU"),
        (
            False,
            ONE,
            False,
            "WARNING",
            "placement.use_gpu=false: computing on CPUs, although there is",
        ),
        (
            "auto",
            SeenGpus(0, "torch sees no GPU", "the driver is too old"),
            False,
            "WARNING",
            "auto resolves to false because the GPU cannot be used: the driver is too old",
        ),
        (True, ONE, True, None, ""),
        (False, NONE, False, None, ""),
    ],
)
def test_use_gpu_is_settled_and_said_in_one_line(asked, seen, expected, level, told, log):
    assert settled_gpu(asked, seen, "placement.use_gpu") is expected
    assert [r.levelname for r in log.records] == ([level] if level else [])
    assert told in log.text


def test_a_gpu_that_is_asked_for_and_not_there_is_refused_with_what_was_seen():
    with pytest.raises(
        PlacementError, match=r"use_gpu is true, but no node has a GPU: torch .*sees"
    ):
        settled_gpu(True, gpus_here(), "placement.use_gpu")
    broken = SeenGpus(0, "torch sees none", "driver 470 is too old")
    with pytest.raises(PlacementError, match="driver 470 is too old"):
        settled_gpu(True, broken, "placement.use_gpu")
    assert settled_gpu(True, NONE, "placement.use_gpu", waits=True), "nodes with GPUs may come"


def test_auto_is_refused_where_gpus_may_be_still_to_come():
    waits = Placement(wait_for_nodes_seconds=600)
    with pytest.raises(PlacementError, match=r"use_gpu=true to wait for GPUs, or placement"):
        settled_placement(waits, NONE)
    assert settled_placement(waits, ONE).use_gpu is True
    for said in (True, False):
        decided = waits.model_copy(update={"use_gpu": said})
        assert settled_placement(decided, NONE).use_gpu is said


def test_a_named_kind_of_gpu_is_a_gpu_and_contradicts_cpus():
    assert placed_here(Placement(gpu="H100")).use_gpu is True
    with pytest.raises(PlacementError, match="no node has a GPU"):
        settled_placement(Placement(gpu="H100"), NONE)
    with pytest.raises(ConfigError, match="use_gpu=false trains on CPUs"):
        parse(Placement, {"gpu": "H100", "use_gpu": False})


@pytest.mark.parametrize("kind", [Placement, EvaluationPlacement])
def test_this_machine_settles_what_is_done_in_this_process(kind, gpus, log):
    run = SimpleNamespace(placement=kind(), model_copy=lambda update: SimpleNamespace(**update))
    gpus(2)
    assert with_device(run, Here()).placement.use_gpu is True
    assert "auto resolves to true: this machine has 2 GPUs (NVIDIA H100)" in log.text
    gpus(0)
    settled = with_device(run, Here()).placement
    assert (settled.use_gpu, settled.on_gpu) == (False, False)
    assert f"torch {torch.__version__}" in log.text


def test_a_gpu_that_torch_cannot_use_is_warned_of(gpus, monkeypatch, log):
    gpus(0)
    old = GpuFacts("here", "2.13.0+cu130", "13.0", "535.129.03")
    monkeypatch.setattr(gpu_check, "gpu_facts", lambda: old)
    assert with_device(get_recipe("biencoder"), Here()).placement.use_gpu is False
    assert "because the GPU cannot be used: node here has NVIDIA driver 535" in log.text
    plain = GpuFacts("here", "2.13.0+cpu", None, "580.95.05")
    monkeypatch.setattr(gpu_check, "gpu_facts", lambda: plain)
    # A cluster that would only be started for the job is this machine as well.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for runtime in (Here(), OnRay()):
        log.clear()
        assert with_device(get_recipe("biencoder"), runtime).placement.use_gpu is False
        assert "a build without CUDA; install torch's CUDA build" in log.text
        assert "use_gpu is true" not in log.text


@pytest.mark.parametrize(
    ("nodes", "expected", "told"),
    [
        ([{"CPU": 8.0}], False, "the cluster's live node offers no GPU"),
        ([], False, "the cluster's 0 live nodes offer no GPU"),
        (
            [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0}],
            True,
            "the cluster's 2 live nodes have 8 GPUs (H100)",
        ),
    ],
)
def test_live_nodes_settle_what_is_done_on_ray(nodes, expected, told, cluster, log):
    run = with_device(get_recipe("biencoder"), cluster(*nodes))
    assert run.placement.use_gpu is expected
    assert told in log.text


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement(workers=8), False),
        (Placement(workers=2), True),
        (Placement(workers=8, min_workers=2), True),
        (Placement(workers=8, wait_for_nodes_seconds=60), True),  # more may come
        (EvaluationPlacement(workers=8), False),
        (EvaluationPlacement(workers=2), True),
    ],
)
def test_fewer_gpus_than_workers_are_warned_of(placement, expected, cluster, log):
    runtime = cluster(*[{"CPU": 8.0}] * 8, {"CPU": 8.0, "GPU": 2.0})
    run = SimpleNamespace(placement=placement, model_copy=lambda update: SimpleNamespace(**update))
    assert with_device(run, runtime).placement.use_gpu is expected
    few = "too few GPUs (the cluster's 9 live nodes have 2 GPUs): 8 workers need one GPU each"
    assert (few in log.text) is not expected
    assert [record.levelname for record in log.records] == ["INFO" if expected else "WARNING"]


def test_a_cluster_that_would_only_be_started_is_this_machine(gpus, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    gpus(1)
    assert OnRay().gpus(Placement()).text == "this machine has 1 GPU (NVIDIA H100)"


def test_a_run_starts_with_the_device_in_its_record_and_in_its_check(gpus, tmp_path):
    """Neither the check of the machine nor the number type may see `auto`."""
    run, asked = own_run(tmp_path, "model.backbone.dtype=auto"), []
    gpus(1)

    class Watched(Here):
        def check_now(self, placement, *, validates=False):
            asked.append(placement.use_gpu)

        def precision(self, placement):
            asked.append(placement.use_gpu)
            return super().precision(override(run, ["placement.use_gpu=false"]).placement)

    assert run.placement.use_gpu == "auto"
    settled = started(run, Watched())
    assert asked == [True, True]
    assert "use_gpu: true" in settled.to_yaml()
    assert (
        settled.fingerprint
        == started(override(run, ["placement.use_gpu=false"]), Watched()).fingerprint
    )


def test_tables_take_auto_as_this_machine_does(gpus):
    run = get_recipe("biencoder")
    gpus(0)
    assert machines(run.placement).endswith(", no GPU")
    assert "on this machine CPU: torch" in auto_device(run.placement)["device"]
    gpus(1)
    assert machines(run.placement).endswith(", 1 GPUs")
    assert "on this machine GPU: this machine has 1 GPU" in auto_device(run.placement)["device"]
    on_cpus = override(run, ["placement.use_gpu=false"]).placement
    assert machines(on_cpus).endswith(", no GPU")
    assert not auto_device(on_cpus)


def test_an_evaluation_records_the_device(gpus):
    gpus(1)
    run = parse(EvaluationRun, {"model": {"reference": "x"}, "benchmarks": ["wikipedia"]})
    assert "use_gpu: true" in with_device(run, Here()).to_yaml()


def test_an_evaluation_whose_gpus_do_not_fit_is_told_of_cpus(cluster):
    cluster({"CPU": 8.0, "GPU": 1.0})
    evaluation_on_ray._check_room(Workers(number=1, gpu=True))
    with pytest.raises(PlacementError, match=r"workers=2 need .*\(placement\.use_gpu=false"):
        evaluation_on_ray._check_room(Workers(number=2, gpu=True))
    evaluation_on_ray._check_room(Workers(number=2))


class Accelerator:
    def __init__(self, name):
        self.name = name

    def device_name(self):
        return self.name


@pytest.fixture
def process(monkeypatch):
    """A process in which DeepSpeed and a process group stand as they are said to."""

    def has(accelerator=None, backend=None):
        held = SimpleNamespace(ds_accelerator=accelerator and Accelerator(accelerator))
        monkeypatch.setitem(sys.modules, training_here._ACCELERATOR, held)
        monkeypatch.setattr(dist, "is_initialized", lambda: backend is not None)
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        devices = {"gloo": "cpu:gloo,cuda:gloo", "nccl": "cuda:nccl"}
        monkeypatch.setattr(dist, "get_backend_config", lambda: devices.get(backend, backend))

    monkeypatch.setenv("DS_ACCELERATOR", "unset")
    return has


@pytest.mark.parametrize(
    ("accelerator", "backend", "device"),
    [
        (None, None, "cuda"),
        (None, None, "cpu"),
        ("cuda", "nccl", "cuda"),
        ("cpu", "gloo", "cpu"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda"),
        (None, "cpu:gloo,cuda:nccl", "cpu"),
    ],
)
def test_a_process_trains_on_the_device_that_it_has_trained_on(
    accelerator, backend, device, process, monkeypatch
):
    process(accelerator, backend)
    take_device(device)
    # What another job has set before DeepSpeed was imported does not stay.
    assert training_here.os.environ["DS_ACCELERATOR"] == device


@pytest.mark.parametrize(
    ("accelerator", "backend", "device", "told"),
    [
        ("cpu", "gloo", "cuda", "DeepSpeed computes on 'cpu'"),
        ("cuda", "nccl", "cpu", "DeepSpeed computes on 'cuda'"),
        (None, "gloo", "cuda", "torch.distributed group uses the backend 'gloo'"),
        (None, "nccl", "cpu", "torch.distributed group uses the backend 'nccl'"),
    ],
)
def test_the_other_device_is_refused_before_any_work(
    accelerator, backend, device, told, process, gpus
):
    gpus(1)
    process(accelerator, backend)
    placement = Placement(use_gpu=device == "cuda")
    with pytest.raises(PlacementError, match="Start a new process") as refused:
        Here().check_now(placement)
    assert told in str(refused.value)
    assert f"placement.use_gpu={str(device == 'cuda').lower()} trains on" in str(refused.value)


def test_a_real_cpu_training_cannot_be_followed_by_one_on_a_gpu(gpus, monkeypatch):
    """DeepSpeed and gloo as they are, not as they are faked to be."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        pytest.skip("DeepSpeed took a GPU in this process")
    gpus(1)
    with pytest.raises(PlacementError, match="DeepSpeed computes on 'cpu'"):
        Here().check_now(Placement(use_gpu=True))
    Here().check_now(Placement(use_gpu=False))


def test_growing_segments_are_set_for_local_work_and_never_over_the_users(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_here, "work_begins", lambda: None)
        Here().start()
        assert training_here.os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert allocator_environment(), "what was set here goes to workers as well"
    for name in names:
        with monkeypatch.context() as patch:
            patch.delenv("PYTORCH_ALLOC_CONF", raising=False)
            patch.setenv(name, "max_split_size_mb:512")
            assert not allocator_environment()


def test_deterministic_operations_alone_and_the_rest_refused_by_name():
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    with (
        pytest.raises(PlacementError, match=r"placement\.deterministic is true.*put_") as refused,
        deterministic(True),
    ):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert "Set placement.deterministic=false" in str(refused.value)
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    with pytest.raises(RuntimeError, match="another matter"), deterministic(True):
        raise RuntimeError("another matter")


def test_cublas_is_told_before_the_process_uses_its_gpu(monkeypatch):
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, ":16:8")
    check_deterministic_start()
    assert training_here.os.environ[name] == ":16:8"
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PlacementError, match="start a new process"):
        check_deterministic_start()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    check_deterministic_start()
    assert training_here.os.environ[name] == ":4096:8"
    monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"deterministic": True}, True),
        ({"deterministic": True, "use_gpu": True}, True),
        ({"deterministic": True, "use_gpu": False}, False),
        ({}, False),
    ],
)
def test_a_local_run_tells_cublas_before_anything_looks_for_a_gpu(settings, expected, monkeypatch):
    """The name of a GPU alone makes torch use it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(pipeline_here, "work_begins", lambda: None)
    told = []
    monkeypatch.setattr(pipeline_here, "check_deterministic_start", lambda: told.append("told"))
    monkeypatch.setattr(pipeline_here, "usable_gpus_here", lambda: told.append("looked") or ONE)
    runtime = runtime_of(Placement(**settings))
    runtime.start()
    runtime.gpus(Placement())
    assert told == [*(["told"] if expected else []), "looked"]


def test_a_local_training_takes_deterministic_operations(monkeypatch):
    for wanted in (True, False):
        with training_here._one_worker(Placement(use_gpu=False, deterministic=wanted)):
            assert torch.are_deterministic_algorithms_enabled() is wanted
        assert not torch.are_deterministic_algorithms_enabled()
