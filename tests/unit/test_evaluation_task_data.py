"""Data of tasks that a hub gives late or not at all; the hub is one on loopback."""

import datasets.config
import huggingface_hub.constants
import mteb
import pytest
from mteb_hub import mteb_hub, read_from
from waits import note_waits

from rayembed.errors import AssetError
from rayembed.evaluation.jobs import WAITS_SECONDS, load_data


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    tasks = [mteb.get_task(name) for name in ("STS12", "SciFact")]
    with mteb_hub(tasks, tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def hub(served, tmp_path, monkeypatch):
    """The hub as it is when nothing was asked of it, and an empty cache."""
    read_from(monkeypatch, served, tmp_path)
    yield served
    served.limit, served.before_limit, served.down, served.gated = 0, 0, False, ()
    served.retry_after = 1


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits of the hub's own client are noted and not waited."""
    return note_waits(monkeypatch, "huggingface_hub.utils._http", "datasets.utils.file_utils")


def refused(task) -> str:
    with pytest.raises(AssetError) as caught:
        load_data(task, waits=(), sleep=lambda seconds: None)
    assert repr(task.metadata.name) in str(caught.value)
    return str(caught.value)


def test_few_refusals_are_waited_out_by_the_hubs_client(hub, quick):
    hub.limit, hub.retry_after = 5, 7
    task = mteb.get_task("STS12")
    load_data(task, sleep=lambda seconds: pytest.fail("waited here"))
    assert task.dataset["test"].num_rows == 24
    assert {8} <= set(quick)  # it adds a second to what the hub names


@pytest.mark.parametrize("before", [0, 2, 9])
def test_a_longer_limit_is_waited_out_here(hub, before):
    hub.limit, hub.before_limit, hub.retry_after = 10**6, before, 90
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            hub.limit = 0

    task = mteb.get_task("SciFact")
    load_data(task, sleep=sleep)
    assert waited == [90, 90]  # as the hub asks, where that is longer
    assert task.data_loaded
    assert len(task.dataset["default"]["test"]["corpus"]) == 30


def test_waits_grow_where_the_hub_names_none(hub):
    hub.down = True
    waited: list[float] = []
    with pytest.raises(
        AssetError, match=r"'STS12'.*the hub failed with status 503.*Run again later"
    ):
        load_data(mteb.get_task("STS12"), sleep=waited.append)
    assert tuple(waited) == WAITS_SECONDS


def test_a_limit_that_stays_is_told(hub):
    hub.limit = 10**6
    assert "too many requests (429). Run again later" in refused(mteb.get_task("STS12"))


@pytest.mark.parametrize("name", ["STS12", "SciFact"])
def test_what_is_not_there_or_closed_is_told_at_once(hub, name):
    task = mteb.get_task(name)
    hub.gated = (task.metadata.dataset["path"],)
    assert "Request it on the data set's page" in refused(task)
    hub.gated = ()
    for change in ({"path": "mteb/none"}, {"revision": "of-nobody"}):
        other = mteb.get_task(name)
        place = {**other.metadata.dataset, **change}
        other.metadata = other.metadata.model_copy(update={"dataset": place})
        told = refused(other)
        assert repr(next(iter(change.values()))) in told
        assert "doesn't exist" in told
        assert "HF_TOKEN" in told


def test_a_machine_that_is_offline_is_told(hub, monkeypatch):
    before = list(hub.asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(mteb.get_task("STS12"))
    assert hub.asked == before


def test_a_hub_that_is_not_there_is_told(hub, quick, tmp_path, monkeypatch):
    closed = type(hub)({}, address="http://127.0.0.1:9")
    read_from(monkeypatch, closed, tmp_path / "other")
    waited: list[float] = []
    with pytest.raises(AssetError, match=r"'SciFact'.*cannot be reached\. Check the network"):
        load_data(mteb.get_task("SciFact"), sleep=waited.append)
    # The hub's client has waited for it; of that `datasets` tells no cause, so nothing waits again.
    assert (quick, waited) == ([1, 2, 4, 8, 8], [])


def test_files_that_cannot_be_read_are_told(hub):
    files = hub.files["mteb/scifact"]
    whole = files["corpus.jsonl"]
    try:
        files["corpus.jsonl"] = b'{"_id": "d1", "text'
        assert "cannot be loaded: " in refused(mteb.get_task("SciFact"))
    finally:
        files["corpus.jsonl"] = whole
