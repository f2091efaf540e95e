"""Whether a node's driver and GPU can train, judged by facts that need no GPU."""

from types import SimpleNamespace

import pytest

from rayembed.config.placement import Placement
from rayembed.errors import PlacementError
from rayembed.pipeline import here
from rayembed.pipeline.here import Here
from rayembed.training import on_ray
from rayembed.training.gpu_check import (
    GpuFacts,
    driver_in,
    gpu_facts,
    gpu_problem,
    product_error,
)

GOOD = GpuFacts("gpu-3", "2.13.0+cu130", "13.0", "580.65.06", "NVIDIA H100 80GB HBM3")


def with_(**changes):
    return GpuFacts(**{**vars(GOOD), **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"cuda": None, "torch": "2.13.0+cpu"},
            ["a build without CUDA", "placement.use_gpu=false"],
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

    def __init__(self, facts):
        self.facts, self.asked, self.cancelled = facts, [], []
        self.exceptions = SimpleNamespace(RayError=OSError)

    def nodes(self):
        gpus = [{"Alive": True, "NodeID": name, "Resources": {"GPU": 8.0}} for name in self.facts]
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
    def put(*facts):
        ray = FakeRay(dict(zip(IDS, facts, strict=False)))
        monkeypatch.setattr(on_ray, "ray", ray)
        monkeypatch.setattr(on_ray, "await_capacity", lambda *_, **__: None)
        return ray

    return put


GPUS = Placement(workers=2, use_gpu=True)


def test_each_node_with_gpus_is_asked_before_data_is_prepared(fake, caplog):
    ray = fake(GOOD, GOOD, None)
    on_ray.check_placement_now(GPUS)
    assert ray.asked == IDS
    assert ray.cancelled == IDS[2:]
    assert "1 of 3 nodes had no GPU free" in caplog.text


def test_a_node_that_cannot_train_is_refused_by_name(fake):
    fake(GOOD, with_(node="old", driver="535.129.03"), OSError("died"))
    with pytest.raises(PlacementError, match="node old has NVIDIA driver 535") as refused:
        on_ray.check_placement_now(GPUS)
    assert "does not answer when its GPU is checked: died" in str(refused.value)


def test_nodes_that_are_waited_for_are_asked_when_they_are_there(fake):
    placement = GPUS.model_copy(update={"wait_for_nodes_seconds": 60.0})
    ray = fake(GOOD)
    on_ray.check_placement_now(placement)
    assert not ray.asked
    on_ray.check_ready(placement)
    assert ray.asked == IDS[:1]


def test_without_gpus_nobody_is_asked_and_with_them_not_twice(fake):
    ray = fake(GOOD)
    on_ray.check_placement_now(Placement(workers=2))
    on_ray.check_ready(GPUS)
    assert not ray.asked


def test_this_machine_is_asked_too(monkeypatch):
    monkeypatch.setattr(here, "gpu_facts", lambda: with_(driver="535.129.03"))
    with pytest.raises(PlacementError, match="node gpu-3 has NVIDIA driver 535"):
        Here().check_now(Placement(use_gpu=True))
