"""Whether a node's driver and GPU can train, judged by facts that need no GPU."""

from types import SimpleNamespace

import pytest

from rayembed.config.evaluation import EvaluationPlacement
from rayembed.config.placement import Placement
from rayembed.errors import PlacementError
from rayembed.machine import gpu_check_on_ray
from rayembed.machine.device import settled_placement
from rayembed.machine.gpu_check import GpuFacts, driver_in, gpu_facts, gpu_problem, product_error
from rayembed.machine.gpu_check_on_ray import cluster_gpus
from rayembed.pipeline.run import runtime as here
from rayembed.pipeline.run.runtime import Here
from rayembed.training import on_ray

GOOD = GpuFacts("gpu-3", "2.13.0+cu130", "13.0", "580.65.06", "NVIDIA H100 80GB HBM3")


def with_(**changes):
    return GpuFacts(**{**vars(GOOD), **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"cuda": None, "torch": "2.13.0+cpu"},
            ["a build without CUDA", "image for GPUs"],
        ),
        (
            {"driver": None, "gpu": None, "error": "Found no NVIDIA driver on your system"},
            ["no NVIDIA driver", "container toolkit"],
        ),
        (
            {"driver": "535.129.03"},
            [
                "NVIDIA driver 535.129.03",
                "CUDA 13.0, which needs driver 580.65.06 or later",
                "torch for CUDA 12 (--build-arg TORCH_INDEX=",
            ],
        ),
        ({"driver": "580.60.01"}, ["needs driver 580.65.06"]),
        ({"cuda": "12.6", "driver": "470.82.01"}, ["needs driver 525.60.13", "torch for CUDA 11"]),
        ({"driver": "390.157"}, ["update the node's driver"]),
        (
            {"error": "CUDA error: uncorrectable ECC error encountered"},
            ["driver 580.65.06", "H100", "uncorrectable ECC error", "nvidia-smi"],
        ),
        ({"gpu": None, "error": "No CUDA GPUs are available"}, ["No CUDA GPUs are available"]),
    ],
)
def test_what_is_wrong_names_the_node_and_what_to_do(changes, told):
    problem = gpu_problem(with_(**changes))
    assert problem is not None
    assert problem.startswith("node gpu-3 ")
    for part in told:
        assert part in problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"driver": "595.10"},
        {"cuda": "12.6", "driver": "535.129.03"},
        {"cuda": "15.0"},
        {"driver": None},
    ],
)
def test_what_is_right_is_taken(changes):
    """Of an unknown CUDA, and where a sandbox hides the driver, the product alone decides."""
    assert gpu_problem(with_(**changes)) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19", "535.129.03"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
        ("NVRM version: something else", None),
    ],
)
def test_the_driver_by_its_kernel_module(text, version):
    assert driver_in(text) == version


def test_a_product_is_judged():
    assert product_error("cpu") is None
    assert product_error("cpu", bf16=False) is None
    assert "nosuch" in (product_error("nosuch") or "")


def test_the_facts_of_a_machine_without_a_gpu_are_taken_too():
    facts = gpu_facts()
    if facts.gpu is not None:
        pytest.skip("there is a GPU")
    assert facts.error
    assert gpu_problem(facts)


class FakeRay:
    """Nodes of a cluster and what a task says on each; None: its GPUs are taken."""

    def __init__(self, facts, kinds):
        self.facts, self.asked, self.cancelled, self.kinds = facts, [], [], kinds
        self.exceptions = SimpleNamespace(RayError=OSError)

    def nodes(self):
        kinds = [{f"accelerator_type:{kind}": 1.0} for kind in self.kinds] or [{}] * 9
        gpus = [
            {"Alive": True, "NodeID": name, "Resources": {"GPU": 8.0, **kind}}
            for name, kind in zip(self.facts, kinds, strict=False)
        ]
        return [*gpus, {"Alive": True, "NodeID": "data", "Resources": {"CPU": 8.0}}]

    def remote(self, **options):
        assert options["num_gpus"] == 1
        return lambda _: SimpleNamespace(options=self.on)

    def on(self, *, scheduling_strategy):
        return SimpleNamespace(remote=lambda: self.ask(scheduling_strategy.node_id))

    def ask(self, node):
        self.asked.append(node)
        return node

    def wait(self, asked, *, num_returns, timeout):
        done = [node for node in asked if self.facts[node] is not None]
        return done, [node for node in asked if node not in done]

    def get(self, node):
        if isinstance(self.facts[node], Exception):
            raise self.facts[node]
        return self.facts[node]

    def cancel(self, node):
        self.cancelled.append(node)


IDS = ["a" * 56, "b" * 56, "c" * 56]


@pytest.fixture
def fake(monkeypatch):
    def put(*facts, kinds=()):
        ray = FakeRay(dict(zip(IDS, facts, strict=False)), kinds)
        monkeypatch.setattr(gpu_check_on_ray, "ray", ray)
        monkeypatch.setattr(on_ray, "await_capacity", lambda *_, **__: None)
        return ray

    return put


GPUS = Placement(workers=2, use_gpu=True)


def settle(placement):
    """The placement as a job's start on Ray settles it."""
    return settled_placement(placement, cluster_gpus(placement))


def test_each_node_with_gpus_is_asked_before_data_is_prepared(fake, caplog):
    ray = fake(GOOD, GOOD, None)
    assert settle(GPUS).on_gpu
    assert ray.asked == IDS
    assert ray.cancelled == IDS[2:]
    assert "1 of 3 nodes had no GPU free" in caplog.text


WITHOUT = with_(node="old", cuda=None, torch="2.13.0+cpu", gpu=None, error="not compiled")


@pytest.mark.parametrize("placement", [Placement(), EvaluationPlacement()])
def test_auto_takes_cpus_where_torch_computes_on_no_gpu(placement, fake, caplog):
    ray = fake(WITHOUT)
    assert settle(placement).use_gpu is False
    assert ray.asked == IDS[:1]
    assert (
        "resolves to false because the GPU cannot be used: node old has torch 2.13.0+cpu"
        in caplog.text
    )
    asked = placement.model_copy(update={"use_gpu": True})
    with pytest.raises(PlacementError, match="no GPU can be used: node old has torch"):
        settle(asked)


@pytest.mark.parametrize("use_gpu", [True, "auto"])
def test_nodes_that_cannot_compute_beside_others_are_refused_by_name(use_gpu, fake):
    fake(GOOD, with_(node="old", driver="535.129.03"), OSError("died"))
    with pytest.raises(PlacementError, match="node old has NVIDIA driver 535") as refused:
        settle(Placement(workers=2, use_gpu=use_gpu))
    assert "does not answer when its GPU is checked: died" in str(refused.value)
    assert "placement.use_gpu=false" in str(refused.value)


def test_auto_counts_the_gpus_that_compute_alone(fake, caplog):
    fake(GOOD, WITHOUT)
    assert settle(Placement(workers=9)).use_gpu is False
    assert "because the GPU cannot be used: node old" in caplog.text


def test_nodes_with_gpus_of_other_kinds_are_not_asked(fake):
    ray = fake(GOOD, WITHOUT, kinds=["H100", "T4"])
    on_h100 = Placement(workers=2, gpu="H100")
    assert settle(on_h100).on_gpu
    assert ray.asked == IDS[:1]
    on_ray.check_gpus(on_h100)
    assert ray.asked == IDS[:1] * 2


def test_nodes_that_are_waited_for_are_asked_when_they_are_there(fake):
    placement = GPUS.model_copy(update={"wait_for_nodes_seconds": 60.0})
    ray = fake(GOOD)
    settle(placement)
    on_ray.check_placement_now(placement)
    assert not ray.asked
    on_ray.check_ready(placement)
    assert ray.asked == IDS[:1]
    fake(WITHOUT)
    with pytest.raises(PlacementError, match=r"node old .*train on CPUs \(placement"):
        on_ray.check_ready(placement)


def test_without_gpus_nobody_is_asked_and_with_them_not_twice(fake):
    ray = fake(GOOD)
    settle(Placement(workers=2, use_gpu=False))
    on_ray.check_ready(Placement(workers=2))
    on_ray.check_ready(GPUS)
    assert not ray.asked


def test_a_local_process_is_not_sent_to_images_and_nodes():
    for changes in ({"cuda": None}, {"driver": "535.129.03"}, {"error": "CUDA error"}):
        problem = gpu_problem(with_(**changes), is_here=True)
        assert problem
        assert not any(part in problem for part in ("image", "use_gpu is true", "the node out"))


@pytest.mark.parametrize(
    ("gpu", "device", "warned"),
    [
        ("H100", "NVIDIA L4", True),
        ("H100", "NVIDIA H100 80GB HBM3", False),
        ("A100 80 GB", "NVIDIA A100-SXM4-80GB", False),
        ("A100 80 GB", "NVIDIA A100-PCIE-40GB", True),
        ("L4", "NVIDIA L40S", True),
        ("T4", "Tesla T4", False),
    ],
)
def test_a_local_run_on_another_gpu_than_the_named_one_is_warned(
    gpu, device, warned, monkeypatch, caplog
):
    monkeypatch.setattr(here, "gpu_facts", lambda: with_(gpu=device))
    for name in ("check_capacity", "take_device"):
        monkeypatch.setattr(here, name, lambda *_: None)
    Here().check_now(Placement(gpu=gpu))
    assert (f"placement.gpu is {gpu}, but this machine's GPU is {device}" in caplog.text) is warned


def test_this_machine_is_asked_too(monkeypatch):
    monkeypatch.setattr(here, "gpu_facts", lambda: with_(driver="535.129.03"))
    with pytest.raises(PlacementError, match="node gpu-3 has NVIDIA driver 535"):
        Here().check_now(Placement(use_gpu=True))
