"""What stands around a worker's training: who makes its steps, and what a lost checkpoint means."""

import errno
import os
from types import SimpleNamespace

import pytest
import ray.train
import ray.train.collective

from rayembed.config.placement import Placement
from rayembed.errors import StorageError, StorageFullError
from rayembed.training.train_function.on_ray import step_processes, train_function


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


DENIED, FULL = (OSError(number, os.strerror(number)) for number in (errno.EACCES, errno.ENOSPC))
SILENT = "When completing upload of 'x' in bucket 'y': AWS Error NETWORK_CONNECTION: curlCode: 28"


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (OSError(SILENT), StorageError, "cannot be stored, because the storage does not answer"),
        (DENIED, StorageError, "cannot be stored: [Errno"),
        (FULL, StorageFullError, "does not fit into"),
    ],
)
def test_a_checkpoint_that_cannot_be_stored_says_why(monkeypatch, tmp_path, error, kind, told):
    def report(*_arguments, **_named):
        raise error

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    monkeypatch.setattr(ray.train.collective, "barrier", lambda: None)
    job = SimpleNamespace(
        placement=Placement(),
        pretrained=(),
        start_checkpoint=None,
        trainer=lambda callbacks, _: SimpleNamespace(
            fit=lambda: callbacks[0].on_checkpoint(7, tmp_path)
        ),
    )
    with pytest.raises(StorageError) as caught:
        train_function({"job": job, "sink": None, "offset": 0})
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"the checkpoint of step 7 {told}")
