"""Indexes in the registry: tags of versions, their cards, and the gate `--index-ready`."""

import json

import pytest
from mlflow import MlflowClient

from rayembed.config.table import NamedTable
from rayembed.errors import ArtifactError, ConfigError, TrackingError
from rayembed.pipeline.register.job import run_register_job
from rayembed.registry import indexes
from rayembed.registry.aliases import CHAMPION, alias_version
from rayembed.registry.gates import Check
from rayembed.registry.index_tags import indexes_of, tag_index
from rayembed.registry.indexes import (
    INDEX_TAG,
    IndexFunctions,
    ReadyQuestion,
    entries_of,
    index_ready,
    index_section,
    open_index,
)
from rayembed.registry.promote import Gates, judge, promote
from rayembed.registry.register import DESCRIPTION_CHARACTERS, WEIGHTS_TAG, describe

HERE, NAME, WEIGHTS = __name__, "tiny", "1" * 12
VALUES = {
    "state": "current",
    "store": "lance",
    "table": "docs_1",
    "rows": 1200,
    "dimensions": 32,
    "number_type": "float16",
    "updated": "2026-11-30T12:00:00Z",
}
asked: list[ReadyQuestion] = []


def ready(question):
    asked.append(question)
    holds = question.weights == WEIGHTS
    return Check("index docs is ready", None, None, holds, note="run rayembed upgrade")


@pytest.fixture
def table(monkeypatch):
    asked.clear()
    functions = IndexFunctions(open=f"{HERE}:ready", ready=f"{HERE}:ready")
    made = NamedTable("rayembed.nobody", IndexFunctions, "keeper", {"fake": functions})
    monkeypatch.setattr(indexes, "INDEXES", made)
    monkeypatch.setattr(indexes, "load", lambda _: ready)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    client = MlflowClient(uri, uri)
    client.create_experiment("tests", artifact_location=(folder / "artifacts").as_uri())
    return uri, client


@pytest.fixture
def client(store):
    """A registry with two versions."""
    _, client = store
    experiment = client.get_experiment_by_name("tests").experiment_id
    client.create_registered_model(NAME)
    for number in (1, 2):
        run = client.create_run(experiment)
        tags = {WEIGHTS_TAG: str(number) * 12}
        client.create_model_version(NAME, f"file:///m{number}", run.info.run_id, tags=tags)
    yield client
    for model in client.search_registered_models():
        client.delete_registered_model(model.name)


def version(client, number=1):
    return client.get_model_version(NAME, str(number))


def test_a_version_names_its_indexes_in_tags_and_description(store, client):
    uri, _ = store
    describe(client, NAME, 1, "---\nlicense: mit\n---\n# tiny\n\nA model.")
    assert version(client).description == "# tiny\n\nA model."
    for index in ("docs", "faq"):
        for _ in range(2):
            tag_index("models:/tiny/1", index, VALUES, uri, weights=WEIGHTS)
    tags = version(client).tags
    assert json.loads(tags["rayembed.index.docs"]) == VALUES
    assert [entry.name for entry in entries_of(tags)] == ["docs", "faq"]
    assert [entry.values for entry in indexes_of("models:/tiny/1", uri)] == [VALUES] * 2
    text = version(client).description
    assert text.startswith("# tiny\n\nA model.\n\n## Indexes\n\n")
    assert text.count("## Indexes") == 1
    for told in ("`docs`", "`faq`", "lance `docs_1`", "1200", "32 × float16", "current"):
        assert told in text
    # A card that is written again keeps the section.
    describe(client, NAME, 1, "# tiny\n\nAnother card.")
    assert version(client).description == "# tiny\n\nAnother card." + index_section(tags)
    for index in ("docs", "faq", "faq"):
        tag_index("models:/tiny/1", index, None, uri, weights=WEIGHTS)
    assert version(client).description == "# tiny\n\nAnother card."
    assert not [key for key in version(client).tags if key.startswith(INDEX_TAG)]
    assert indexes_of("models:/tiny/1", uri) == []
    assert indexes_of("some/folder", uri) == []


def test_a_long_card_leaves_room_for_the_indexes(store, client):
    uri, _ = store
    describe(client, NAME, 1, "# tiny\n\n" + "a line of the card\n" * 1000)
    tag_index("models:/tiny/1", "docs", VALUES, uri, weights=WEIGHTS)
    text = version(client).description
    assert len(text) <= DESCRIPTION_CHARACTERS
    assert "The rest stands in the README.md" in text
    assert text.endswith(index_section(version(client).tags))


def test_another_models_version_and_no_version_are_refused(store, client, tmp_path):
    uri, _ = store
    with pytest.raises(ArtifactError, match="was registered again"):
        tag_index("models:/tiny/2", "docs", VALUES, uri, weights=WEIGHTS)
    with pytest.raises(ArtifactError, match="has no version 3"):
        tag_index("models:/tiny/3", "docs", VALUES, uri, weights=WEIGHTS)
    away = f"sqlite:///{tmp_path / 'none.db'}"
    with pytest.raises(TrackingError, match="no MLflow database"):
        tag_index("models:/tiny/1", "docs", VALUES, away, weights=WEIGHTS)
    assert not [key for key in version(client).tags if key.startswith(INDEX_TAG)]


def test_tags_of_others_are_passed_over():
    tags = {f"{INDEX_TAG}a": "no JSON", f"{INDEX_TAG}b": "[1]", "rayembed.other": "{}"}
    assert entries_of(tags) == []
    assert index_section(tags) == ""
    (entry,) = entries_of({f"{INDEX_TAG}c": "{}"})
    assert entry.line.startswith("c: ")
    adapter = {**VALUES, "state": "adapter", "adapter": "affine"}
    (entry,) = entries_of({f"{INDEX_TAG}docs": json.dumps(adapter)})
    assert (
        entry.line == "docs: adapter affine, lance table docs_1, 1,200 rows, 32 dimensions, float16"
    )


def test_the_gate_asks_for_each_index_and_refuses_the_champion(client, table):
    gates = Gates(index_ready=("docs", "faq"), compatible=0.97, storage="/shared")
    refused = promote(client, NAME, 2, (), gates)
    assert not refused.moved
    assert [check.note for check in refused.decision.checks] == ["run rayembed upgrade"] * 2
    assert alias_version(client, NAME, CHAMPION) is None
    assert asked == [
        ReadyQuestion("/shared", name, "2" * 12, 0.97, "models:/tiny/2") for name in ("docs", "faq")
    ]
    assert promote(client, NAME, 1, (), gates).moved
    assert alias_version(client, NAME, CHAMPION) == 1
    asked.clear()
    judge(client, NAME, (), gates, number=None, weights_fingerprint=WEIGHTS)
    assert {question.reference for question in asked} == {"MODEL"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--index-ready", "docs"], "apply to a promotion only; add"),
        (["--promote", "--compatible", "0.9", "--require", "mean>=0"], "--compatible applies to"),
        (["--promote", "--index-ready", "docs", "--compatible", "97"], "must be a share above 0"),
        (["--promote"], "--index-ready INDEX"),
    ],
)
def test_wrong_gates_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        run_register_job.resolve(["--model", "models:/tiny/1", *words])


def test_the_options_become_gates(tmp_path):
    words = ["--model", "models:/tiny/1", "--promote", "--index-ready", "docs", "--index-ready"]
    words += ["docs", "--compatible", "0.97", "--storage-path", str(tmp_path)]
    gates = run_register_job.resolve(words)[0].gates
    assert (gates.index_ready, gates.compatible, gates.storage) == (("docs",), 0.97, str(tmp_path))


def test_without_a_package_that_keeps_indexes_the_gate_says_so(monkeypatch):
    empty = NamedTable("rayembed.nobody", IndexFunctions, "keeper", {})
    monkeypatch.setattr(indexes, "INDEXES", empty)
    with pytest.raises(ConfigError, match="no installed package keeps indexes"):
        index_ready(ReadyQuestion("/x", "docs", WEIGHTS, None, "models:/tiny/1"))
    with pytest.raises(ConfigError, match="no installed package keeps indexes"):
        open_index("/x", "docs", WEIGHTS)
