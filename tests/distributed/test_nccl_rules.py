"""Controls of what all tests of several workers are held to: each rule of NCCL is one that gloo
does not have.
"""

import pytest
import torch
import torch.distributed as dist
from nccl_rules import Call, difference, refused
from run_distributed import run_distributed

pytestmark = pytest.mark.distributed


def strided():
    return torch.zeros(4, 2).t()


def gathered(dtype):
    """By gloo, which gathers bytes of any type."""
    own = torch.zeros(2, dtype=dtype)
    return [torch.zeros_like(own) for _ in range(dist.get_world_size())], own


def broken(rank, world):
    """Messages of the rules."""
    found = {}
    for name, collective in {
        "strides": lambda: dist.all_reduce(strided()),
        "strides of a list": lambda: dist.all_gather([torch.zeros(2, 4), strided()], strided()),
        "uint16": lambda: dist.all_gather(*gathered(torch.uint16)),
        "int16": lambda: dist.all_gather(*gathered(torch.int16)),
        "point to point": lambda: dist.send(strided(), 1 - rank),
        "taken": lambda: dist.all_gather(*gathered(torch.bfloat16)),
    }.items():
        try:
            collective()
        except AssertionError as error:
            found[name] = str(error)
    return found


def test_each_rule_is_held():
    for found in run_distributed(broken, 2):
        assert found.keys() == {
            "strides", "strides of a list", "uint16", "int16", "point to point"
        }  # fmt: skip
        assert "allreduce of (2, 4) torch.float32 on cpu: its strides" in found["strides"]
        assert "no such number type" in found["uint16"]


def test_a_tensor_on_another_device_is_refused():
    assert "the worker is on cuda" in refused("allreduce", [torch.zeros(2)], "cuda")
    assert refused("allreduce", [torch.zeros(2, device="meta")], "meta") is None


def in_other_order(rank, world):
    """Two groups whose workers begin with another one each: gloo bears it."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    order = groups if rank == 0 else groups[::-1]
    values = [torch.ones(2 + (group is groups[0])) for group in order]
    work = [dist.all_reduce(v, group=g, async_op=True) for v, g in zip(values, order, strict=True)]
    for one in work:
        one.wait()
    assert all((value == 2).all() for value in values)


def test_workers_that_start_other_collectives_are_seen():
    with pytest.raises(AssertionError, match=r"NCCL would hang.*worker 0 is Call.*elements=.3,"):
        run_distributed(in_other_order, 2)


def test_only_common_groups_are_compared():
    first, all_three = Call("allreduce", (0, 1), ("x",), (2,)), Call("barrier", (0, 1, 2), (), ())
    assert difference({0: [first, all_three], 1: [first, all_three], 2: [all_three]}) is None
    assert "worker 2" in difference({0: [first, all_three], 1: [first, all_three], 2: []})
    assert "worker 1" in difference({0: [all_three, first], 1: [first, all_three], 2: [all_three]})
