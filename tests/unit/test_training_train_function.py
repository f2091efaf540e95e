"""What stands around a worker's training: who makes its steps, and what a lost checkpoint means."""

import errno
import os

import pytest

from rayembed.config.placement import Placement
from rayembed.errors import StorageError, StorageFullError
from rayembed.training.failures.on_ray import _ours
from rayembed.training.train_function.on_ray import _not_kept, step_processes


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


def test_only_a_checkpoint_without_room_ends_the_run_at_once():
    silent = OSError("When completing upload: AWS Error NETWORK_CONNECTION: curlCode: 28, Timeout")
    error = _not_kept(7, silent)
    assert type(error) is StorageError
    assert "checkpoint of step 7 cannot be stored" in str(error)
    assert "(the storage does not answer)" in str(error)
    assert _ours([error]) is None, "the next try may fare better"
    denied = _not_kept(7, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    assert type(denied) is StorageError
    assert "does not answer" not in str(denied)
    full = _not_kept(7, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert type(full) is StorageFullError
    assert "Make room" in str(full)
    assert _ours([full]) is full
