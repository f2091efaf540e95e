"""A pool whose workers are all away: waits that end, and requests that could never be met."""

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from waits import Clock, Replaced

from rayembed.errors import PlacementError, WorkerError
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.pooled import dispatch_on_ray as dispatch
from rayembed.evaluation.pooled import on_ray
from rayembed.evaluation.pooled.dispatch_on_ray import RayPool
from rayembed.evaluation.pooled.embedding_store import EmbeddingBucket, TextUnit
from rayembed.evaluation.pooled.on_ray import run_jobs
from rayembed.evaluation.pooled.pool import Workers


class Method:
    """A remote method of an actor whose process ends whenever it is called."""

    def remote(self, *_):
        return object()


class DyingWorker:
    """An actor that Ray restarts each time."""

    do = ready = Method()


class Calls:
    """Ray's calls for what workers do, all of whom have ended."""

    def __init__(self):
        self.waits = 0

    def wait(self, references, num_returns=1, timeout=None):
        del timeout
        self.waits += 1
        assert self.waits < 5000, "it waits without an end"
        return references[:num_returns], references[num_returns:]

    def get(self, reference):
        raise ActorUnavailableError("ended", None)


def test_workers_that_die_whenever_they_come_back_are_not_waited_for_without_end(monkeypatch):
    clock, calls = Clock(), Calls()
    monkeypatch.setattr(dispatch, "ray", Replaced(ray, wait=calls.wait, get=calls.get))
    monkeypatch.setattr(dispatch, "time", clock)
    pool = RayPool([DyingWorker(), DyingWorker()], 100_000)
    with pytest.raises(WorkerError, match="no evaluation worker came back within 600 s"):
        list(pool.run([TextUnit(EmbeddingBucket(EncodeSpec("query"), 0, 1), ("a text",))]))
    assert 500 < clock.now < 700


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        (Workers(number=5), "workers=5 need 1 CPUs each on one node, but only 4 workers fit"),
        (
            Workers(number=2, cpus=2.0),
            "workers=2 need 2 CPUs each on one node, but only 1 workers fit",
        ),
        (Workers(gpu=True), "need 1 CPUs and 1 GPUs each on one node, but only 0 workers fit"),
    ],
)
def test_what_a_cluster_cannot_give_is_refused_and_not_waited_for(monkeypatch, workers, told):
    """Three CPUs on one node and one on another; a third node is dead."""
    nodes = [
        {"Alive": alive, "Resources": {"CPU": cpus}}
        for alive, cpus in ((True, 3.0), (True, 1.0), (False, 8.0))
    ]
    monkeypatch.setattr(on_ray, "ray", Replaced(ray, nodes=lambda: nodes))
    with pytest.raises(PlacementError, match=told):
        list(run_jobs(["any"], None, None, workers))
