"""What stands around a worker's training: its environment, and what a lost checkpoint means."""

import errno
import os
from types import SimpleNamespace

import pytest
import ray
import ray.train
import ray.train.collective
import torch

from rayembed.config.placement import Placement
from rayembed.errors import StorageError, StorageFullError
from rayembed.training.train_function_on_ray import TransportLog, train_function, worker_environment


def test_memory_of_gpus_grows_in_segments_unless_somebody_set_the_allocator(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    on_gpus = worker_environment(Placement(use_gpu=True))
    assert on_gpus["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in worker_environment(Placement())
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:512")
            assert not {*names} & worker_environment(Placement(use_gpu=True)).keys()


def test_the_watchdog_of_nccl_is_on_unless_somebody_set_it(monkeypatch):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    on_gpus = worker_environment(Placement(use_gpu=True))
    assert on_gpus[name] == "3"
    assert on_gpus["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert int(on_gpus["TORCH_FR_BUFFER_SIZE"]) > 0
    assert name not in worker_environment(Placement())
    monkeypatch.setenv(name, "1")
    assert name not in worker_environment(Placement(use_gpu=True))


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"compile_layers": True}, "TORCHINDUCTOR_COMPILE_THREADS", "4"),
        ({"use_gpu": True, "deterministic": True}, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ],
)
def test_what_a_worker_reads_when_it_starts_is_set_unless_somebody_set_it(
    settings, name, value, monkeypatch
):
    monkeypatch.delenv(name, raising=False)
    assert worker_environment(Placement(**settings))[name] == value
    without = Placement(use_gpu=settings.get("use_gpu", False), compile_layers=False)
    assert name not in worker_environment(without)
    monkeypatch.setenv(name, "1")
    assert name not in worker_environment(Placement(**settings))


@pytest.mark.parametrize("use_gpu", [True, False])
def test_deepspeed_takes_the_workers_device_whatever_a_node_says(use_gpu, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu" if use_gpu else "cuda")
    found = worker_environment(Placement(use_gpu=use_gpu))["DS_ACCELERATOR"]
    assert found == ("cuda" if use_gpu else "cpu")


@pytest.mark.parametrize(("folder", "is_one"), [("rayembed", True), ("my files", False)])
def test_an_allocator_below_a_path_with_a_space_is_not_preloaded(
    folder, is_one, tmp_path, monkeypatch
):
    """The loader takes a space for the end of a path, and warns in every process."""
    library = tmp_path / folder / "core" / "libjemalloc.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(ray, "__file__", str(tmp_path / folder / "__init__.py"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    preloaded = worker_environment(Placement()).get("LD_PRELOAD")
    assert preloaded == (str(library) if is_one else None)


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
    ended = []

    def trainer(callbacks, _):
        def fit(memory):
            for one in callbacks:
                one.on_checkpoint(7, tmp_path)
            for one in callbacks:
                one.on_train_end()
            ended.append(7)  # weights would follow

        return SimpleNamespace(fit=fit)

    job = SimpleNamespace(placement=Placement(), fetch=lambda: None, trainer=trainer)
    sink = SimpleNamespace(where=SimpleNamespace(remote=lambda where: None))
    with pytest.raises(StorageError) as caught:
        train_function({"job": job, "sink": sink, "offset": 0, "memory": ""})
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"the checkpoint of step 7 {told}")
    assert not ended


def train(monkeypatch, placement, fit=lambda **_: None, callbacks=()):
    """A worker's training in this process, whose callbacks are put into a list."""
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    monkeypatch.setattr(ray.train.collective, "barrier", lambda: None)

    def trainer(given, _):
        callbacks.extend(given)
        return SimpleNamespace(fit=fit)

    job = SimpleNamespace(placement=placement, fetch=lambda: None, trainer=trainer)
    sink = SimpleNamespace(where=SimpleNamespace(remote=lambda where: None))
    train_function({"job": job, "sink": sink, "offset": 0, "memory": ""})


def test_a_worker_takes_deterministic_operations(monkeypatch):
    seen = []
    for wanted in (True, False):
        placement = Placement(use_gpu=False, deterministic=wanted)
        look = lambda **_: seen.append(torch.are_deterministic_algorithms_enabled())  # noqa: E731
        train(monkeypatch, placement, look, [])
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("use_gpu", "workers", "here", "watched"),
    [(True, 16, 8, True), (True, 2, 1, True), (True, 8, 8, False), (False, 16, 8, False)],
)
def test_nccls_network_is_watched_on_several_nodes(
    use_gpu, workers, here, watched, monkeypatch, tmp_path
):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    sizes = {"get_world_size": lambda: workers, "get_local_world_size": lambda: here}
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(**sizes))
    callbacks = []
    train(monkeypatch, Placement(use_gpu=use_gpu), callbacks=callbacks)
    assert any(isinstance(one, TransportLog) for one in callbacks) is watched
    assert ("NCCL_DEBUG_FILE" in os.environ) is watched
