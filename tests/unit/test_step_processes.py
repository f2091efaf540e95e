"""Who makes the steps of a worker."""

import pytest

from rayembed.config.placement import Placement
from rayembed.training.on_ray import step_processes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0),
        ({"use_gpu": True}, 2),
        ({"use_gpu": True, "step_processes": 0}, 0),
        ({"step_processes": 1}, 1),
    ],
)
def test_a_thread_on_cpus_and_processes_beside_a_gpu_where_nothing_is_asked(settings, expected):
    assert step_processes(Placement(**settings)) == expected
