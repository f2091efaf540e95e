"""Aliases against a real MLflow store: gates, crashes at every write, several at once."""

import json
import threading
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from waits import Clock, Replaced

from rayembed.errors import ArtifactError, TrackingError
from rayembed.registry import aliases
from rayembed.registry.aliases import CHAMPION, PREVIOUS, ROLLED_BACK_TAG, alias_version, lock_name
from rayembed.registry.gates import Requirement
from rayembed.registry.promote import DECISION_TAG, Gates, judge, promote, rollback
from rayembed.registry.register import WEIGHTS_TAG
from rayembed.registry.registered_model import (
    ModelReference,
    get_version,
    keep_scores,
    parse_reference,
    read_scores,
)
from rayembed.results.scores import TaskScore

NAME = "tiny"
ANYTHING = Gates((Requirement("mean", 0.0),))


def scores(value, task="SciFact"):
    return (
        TaskScore(
            task=task,
            category="Retrieval",
            metric="ndcg_at_10",
            value=value,
            dataset="mteb/scifact",
            dataset_revision="r1",
            scores={("test", "default"): value},
            model_revision="w",
        ),
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    client = MlflowClient(*[f"sqlite:///{folder / 'mlflow.db'}"] * 2)
    client.create_experiment("tests", artifact_location=(folder / "artifacts").as_uri())
    return client


@pytest.fixture
def client(store, monkeypatch):
    """A registry with three versions, none of them champion; locks are given up at once."""
    monkeypatch.setattr(aliases, "POLL_SECONDS", 0.02)
    experiment = store.get_experiment_by_name("tests").experiment_id
    store.create_registered_model(NAME)
    for number in (1, 2, 3):
        run = store.create_run(experiment)
        tags = {WEIGHTS_TAG: str(number) * 12}
        store.create_model_version(NAME, f"file:///m{number}", run.info.run_id, tags=tags)
    yield store
    for model in store.search_registered_models():
        store.delete_registered_model(model.name)


@pytest.fixture
def clock(monkeypatch):
    """The time by which leases are taken; the store's own answers take none of it."""
    made = Clock()
    timed = Replaced(time, monotonic=made.monotonic, sleep=made.sleep)
    monkeypatch.setattr(aliases, "time", timed)
    monkeypatch.setattr(aliases, "POLL_SECONDS", 5.0)  # each look at a real store takes a while
    return made


def held(client):
    return alias_version(client, NAME, CHAMPION), alias_version(client, NAME, PREVIOUS)


def version(client, number):
    return get_version(client, ModelReference(NAME, number, None))


def put(client, number, value, gates=ANYTHING):
    keep_scores(client, version(client, number), scores(value), None)
    return promote(client, NAME, number, scores(value), gates)


def test_champion_moves_when_gates_hold_and_previous_keeps_the_one_before(client):
    first = put(client, 1, 0.5)
    assert (first.champion, first.previous, first.moved) == (1, None, True)
    again = put(client, 1, 0.5)
    assert (again.champion, again.previous, again.moved) == (1, None, False)
    second = put(client, 2, 0.6, Gates((Requirement("SciFact", 0.6),), CHAMPION))
    assert (second.champion, second.previous, second.moved) == (2, 1, True)
    assert held(client) == (2, 1)
    assert [m.name for m in client.search_registered_models()] == [NAME]


def test_a_refusal_leaves_the_aliases_and_keeps_its_figures(client):
    put(client, 1, 0.5)
    put(client, 2, 0.6)
    client.set_registered_model_alias(NAME, "candidate", "3")
    before = client.get_registered_model(NAME).aliases
    refused = put(client, 3, 0.55, Gates((Requirement("SciFact", 0.5),), CHAMPION, 0.02))
    assert not refused.decision.holds
    assert not refused.moved
    assert client.get_registered_model(NAME).aliases == before
    found = version(client, 3)
    told = json.loads(found.tags[DECISION_TAG])
    assert told["gates"] == "do not hold"
    path = client.download_artifacts(found.run_id, told["figures"])
    figures = json.loads(Path(path).read_text())
    assert [(g["gate"], g["figure"], g["limit"], g["holds"]) for g in figures["gates"]] == [
        ("SciFact >= 0.5", 0.55, 0.5, True),
        ("mean, against version 2", 0.55, 0.6, False),
        ("SciFact, against version 2", 0.55, pytest.approx(0.58), False),
    ]
    # With the tolerance that it takes and no mean to beat it would hold: the control.
    assert put(client, 3, 0.55, Gates((Requirement("SciFact", 0.5),), "1")).moved


def test_the_first_champion_has_nothing_to_beat(client):
    assert put(client, 1, 0.1, Gates((), CHAMPION)).decision.checks[0].note == (
        "there is no champion yet"
    )
    assert held(client) == (1, None)


def test_a_champion_without_scores_cannot_be_beaten(client):
    client.set_registered_model_alias(NAME, CHAMPION, "1")
    with pytest.raises(ArtifactError, match=r"version 1 .* has no scores to compare with"):
        put(client, 2, 0.9, Gates((), CHAMPION))
    assert held(client) == (1, None)
    assert [m.name for m in client.search_registered_models()] == [NAME]


def test_rollback_goes_back_once_and_a_second_one_changes_nothing(client):
    for number in (1, 2, 3):
        put(client, number, 0.5 + number / 10)
    assert rollback(client, NAME, dry_run=True).champion == 2
    assert held(client) == (3, 2)
    back = rollback(client, NAME)
    assert (back.champion, back.previous, back.moved) == (2, 3, True)
    assert held(client) == (2, 3)
    assert ROLLED_BACK_TAG in version(client, 3).tags
    again = rollback(client, NAME)
    assert (again.champion, again.previous, again.moved) == (2, 3, False)
    assert held(client) == (2, 3)
    # A job that is run again must not bring it back by its scores alone.
    refused = put(client, 3, 0.8)
    assert refused.decision.checks[-1].gate == "never rolled back"
    assert held(client) == (2, 3)
    wanted = put(client, 3, 0.8, Gates(ANYTHING.requirements, again=True))
    assert (wanted.champion, wanted.previous) == (3, 2)
    assert ROLLED_BACK_TAG not in version(client, 3).tags
    assert rollback(client, NAME).champion == 2


def test_rollback_without_a_previous_version_is_refused(client):
    with pytest.raises(ArtifactError, match="has no champion to roll back"):
        rollback(client, NAME)
    put(client, 1, 0.5)
    with pytest.raises(ArtifactError, match="no previous version to roll back to"):
        rollback(client, NAME)
    assert held(client) == (1, None)
    with pytest.raises(ArtifactError, match="no registered model 'other'"):
        rollback(client, "other")
    assert [m.name for m in client.search_registered_models()] == [NAME]


class Dies(Exception):
    """The process ends here."""


WRITES = (
    "set_registered_model_tag",
    "set_registered_model_alias",
    "delete_registered_model_alias",
    "set_model_version_tag",
    "delete_model_version_tag",
    "delete_registered_model",
)


class Killed:
    """A client whose process dies before its n-th write to the registry; then nothing arrives."""

    def __init__(self, client, writes):
        self._client, self._left = client, writes

    def __getattr__(self, name):
        call = getattr(self._client, name)
        if name not in WRITES:
            return call

        def counted(*arguments, **named):
            self._left -= 1
            if self._left < 0:
                raise Dies
            return call(*arguments, **named)

        return counted


@pytest.mark.parametrize("writes", range(6))
def test_a_death_between_any_two_writes_leaves_a_state_that_the_next_one_finishes(
    client, clock, writes
):
    put(client, 1, 0.5)
    put(client, 2, 0.6)
    keep_scores(client, version(client, 3), scores(0.7), None)
    try:
        promote(Killed(client, writes), NAME, 3, scores(0.7), ANYTHING)
        died = False
    except Dies:
        died = True
    assert died == (writes < 5)  # what is to be done, two aliases, the lock, the decision's tag
    champion, previous = held(client)
    # Before the decision took effect, in between, after: never anything else.
    assert (champion, previous) in {(2, 1), (2, 2), (3, 2)}
    back = rollback(client, NAME)
    if writes == 0:  # it had not yet said what it was going to do
        assert (back.champion, back.previous) == (1, 2)
    else:
        assert (back.champion, back.previous) == (2, 3)
    assert [m.name for m in client.search_registered_models()] == [NAME]


def test_a_rollback_that_died_is_finished_and_not_turned_round(client, clock):
    put(client, 1, 0.5)
    put(client, 2, 0.6)
    with pytest.raises(Dies):
        rollback(Killed(client, 2), NAME)
    again = rollback(client, NAME)
    assert (again.champion, again.previous, again.moved) == (1, 2, False)
    assert ROLLED_BACK_TAG in version(client, 2).tags


def test_a_move_that_was_overtaken_by_hand_is_not_finished(client, clock):
    put(client, 1, 0.5)
    keep_scores(client, version(client, 2), scores(0.6), None)
    with pytest.raises(Dies):
        promote(Killed(client, 1), NAME, 2, scores(0.6), ANYTHING)
    client.set_registered_model_alias(NAME, CHAMPION, "3")  # somebody repaired it
    with aliases.turn(client, NAME):
        assert alias_version(client, NAME, CHAMPION) == 3


def test_promotions_at_once_take_turns(client):
    """Each is compared with the champion that it replaces; so the best one stays, by any order."""
    values = {1: 0.5, 2: 0.7, 3: 0.6}
    for number, value in values.items():
        keep_scores(client, version(client, number), scores(value), None)
    outcomes, start = {}, threading.Barrier(3)

    def run(number):
        start.wait()
        gates = Gates((), CHAMPION)
        outcomes[number] = promote(client, NAME, number, scores(values[number]), gates)

    threads = [threading.Thread(target=run, args=(number,)) for number in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[2].moved
    champion, previous = held(client)
    assert champion == 2
    assert previous in (None, 1, 3)
    assert previous is None or outcomes[previous].moved


def test_a_lock_that_is_renewed_is_waited_for_and_then_told(client, monkeypatch):
    monkeypatch.setattr(aliases, "WAIT_SECONDS", 0.3)
    client.create_registered_model(lock_name(NAME), tags={"rayembed.holder": "another"})
    with (
        pytest.raises(TrackingError, match="is being changed by others"),
        aliases.turn(client, NAME),
    ):
        pass
    assert client.get_registered_model(lock_name(NAME)).tags == {"rayembed.holder": "another"}


class SlowToDelete:
    """The client of a process that is held up just before it removes the lock."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        if name == "delete_registered_model":
            time.sleep(0.3)
        return getattr(self._client, name)


def test_one_of_several_takes_over_from_a_process_that_died(client, monkeypatch):
    monkeypatch.setattr(aliases, "LEASE_SECONDS", 3.0)
    client.create_registered_model(lock_name(NAME), tags={"rayembed.holder": "dead"})
    monkeypatch.setattr(aliases, "POLL_SECONDS", 0.01)
    inside, most, failed = 0, [], []
    waited = aliases._take_over

    def take_over(*arguments):
        return waited(SlowToDelete(arguments[0]), *arguments[1:])

    monkeypatch.setattr(aliases, "_take_over", take_over)

    def run():
        nonlocal inside
        try:
            with aliases.turn(client, NAME):
                inside += 1
                most.append(inside)
                time.sleep(0.4)
                inside -= 1
        except TrackingError as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert most == [1] * 4
    assert [model.name for model in client.search_registered_models()] == [NAME]


def test_a_process_that_died_while_it_took_over_is_followed(client, clock):
    put(client, 1, 0.5)
    lock = lock_name(NAME)
    client.create_registered_model(lock, tags={"rayembed.holder": "dead"})
    after = aliases._successor(lock, "dead")
    client.create_registered_model(after, tags={"rayembed.holder": "died too"})
    with aliases.turn(client, NAME) as move:
        move(aliases.Move(2, 1, 1))
    assert held(client) == (2, 1)
    assert [model.name for model in client.search_registered_models()] == [NAME]


def test_a_process_that_was_asleep_for_too_long_moves_nothing(client, clock):
    put(client, 1, 0.5)
    with aliases.turn(client, NAME) as move:
        clock.sleep(aliases.LEASE_SECONDS / 2 + 1)
        with pytest.raises(TrackingError, match="nothing was changed"):
            move(aliases.Move(2, 1, 1))
    assert held(client) == (1, None)


def test_scores_are_kept_as_metrics_tags_and_files_and_only_once(client, tmp_path):
    found = version(client, 1)
    (tmp_path / "SciFact.json").write_text("{}")
    keep_scores(client, found, scores(0.5), tmp_path)
    keep_scores(client, version(client, 1), scores(0.7, task="NFCorpus"), None)
    keep_scores(client, version(client, 1), scores(0.7, task="NFCorpus"), None)
    assert [(s.task, s.value) for s in read_scores(client, found)] == [
        ("NFCorpus", 0.7),
        ("SciFact", 0.5),
    ]
    assert read_scores(client, version(client, 2)) == ()
    tags = version(client, 1).tags
    assert tags["score.SciFact"] == "0.5"
    assert tags["score.category/Retrieval"] == "0.6"
    assert tags["score.mean"] == "0.6"
    metrics = client.get_run(found.run_id).data.metrics
    assert metrics["model/SciFact"] == 0.5
    assert metrics["model/category/Retrieval"] == pytest.approx(0.6)
    files = {f.path for f in client.list_artifacts(found.run_id, f"scores/{'1' * 12}/results")}
    assert files == {f"scores/{'1' * 12}/results/SciFact.json"}
    assert len(client.get_metric_history(found.run_id, "model/NFCorpus")) == 1


def test_judging_changes_nothing(client):
    put(client, 1, 0.5)
    before = client.get_registered_model(NAME).aliases, version(client, 1).tags
    decision = judge(
        client, NAME, scores(0.4), Gates((), CHAMPION), number=None, weights_fingerprint="w"
    )
    assert not decision.holds
    assert (client.get_registered_model(NAME).aliases, version(client, 1).tags) == before


def test_versions_that_are_not_there_are_told_with_those_that_are(client):
    client.set_registered_model_alias(NAME, CHAMPION, "1")
    told = r"no version 7; it has the versions \[1, 2, 3\] and the aliases champion \(version 1\)"
    with pytest.raises(ArtifactError, match=told):
        get_version(client, parse_reference(f"models:/{NAME}/7"))
    with pytest.raises(ArtifactError, match="has no alias 'champoin'"):
        get_version(client, parse_reference(f"models:/{NAME}@champoin"))
    for alias, told in {
        "candidate": f"keeps its start.*take models:/{NAME}/3, or .*evaluation.guard.take=1",
        "previous": f"rayembed register --model models:/{NAME}/3 --promote",
    }.items():
        with pytest.raises(ArtifactError, match=rf"aliases champion \(version 1\)\. .*{told}"):
            get_version(client, parse_reference(f"models:/{NAME}@{alias}"))
    with pytest.raises(ArtifactError, match="no registered model 'none'"):
        get_version(client, parse_reference("models:/none/1"))
