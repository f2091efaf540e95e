"""Training's way into the registry, which is that of the registry job."""

import shutil
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import safetensors.torch
import torch
from made_up_articles import run_over
from mlflow import MlflowClient
from result_files import write_results
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from tiny_folders import save_biencoder
from tiny_models import save_encoder

from rayembed.config.override import override
from rayembed.errors import ArtifactError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.pipeline.register.job import run_register_job
from rayembed.pipeline.register.registration import Training, register_trained
from rayembed.proof.check import check
from rayembed.proof.proof import read_proof
from rayembed.registry.register import MODEL_ID_TAG
from rayembed.registry.registered_model import (
    ModelReference,
    get_version,
    read_scores,
    training_run,
)
from rayembed.registry.tracking import Tracker

DESCRIPTION, TOPICS = "WikiDescriptionRetrieval", "WikiTopicClassification"
TABLE = "| Model | score |\n| --- | ---: |\n| stage 1: one | 0.5 |\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("saved") / "model", seed=7)


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "models" / "one")


@pytest.fixture
def tracker(tmp_path):
    run = run_over("articles.json")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    folder = tmp_path / "run"
    opened = Tracker.open(
        uri, "tests", run.name, run.fingerprint, {}, {}, folder=folder, total_steps=1
    )
    opened.log_resolved_run(run.to_yaml())
    yield opened
    opened.close("FINISHED")


def put(folder, tracker, results=None, share=1.0):
    table = "" if results is None else TABLE
    return register_trained(
        Training(run_over("articles.json"), {}, table, share), str(folder), tracker, results
    )


def client_of(tracker):
    return MlflowClient(tracker.tracking_uri, tracker.tracking_uri)


def without_check(description):
    """A version's description without the check of a copy, which cards of folders without a proof
    lack.
    """
    before, check, behind = description.partition("## Check of a copy\n")
    assert check
    return before + behind.partition("```\n\n")[2]


def test_a_run_registers_its_model_once_and_keeps_what_came_later(folder, tracker, tmp_path):
    weights = weights_fingerprint(folder)
    revision = f"{weights}-aaaaaaaa"
    results = write_results(tmp_path / "out" / revision, {DESCRIPTION: 0.5})
    made = put(folder, tracker, results)
    assert (made.name, made.version, made.uri) == ("test", 1, "models:/test/1")
    assert made.alias_uri == "models:/test@candidate"
    client = client_of(tracker)
    version = client.get_model_version_by_alias("test", "candidate")
    assert (version.version, version.run_id) == (1, tracker.run_id)
    card = (folder / "README.md").read_text()
    assert TABLE.strip() in card
    assert "models:/test@candidate" in card
    assert without_check(version.description) == card.partition("\n---\n")[2].strip()
    steps = sum(stage.steps for stage in run_over("articles.json").stages)
    model = client.get_logged_model(version.tags["rayembed.model_id"])
    assert {(m.key, m.value, m.step) for m in model.metrics} == {
        (f"model/{DESCRIPTION}", 0.5, steps),
        ("model/category/Retrieval", 0.5, steps),
        ("model/mean", 0.5, steps),
    }
    # Scored on more by the registry job, and submitted again: nothing is lost or made twice.
    more = write_results(tmp_path / "more" / revision, {TOPICS: 0.25})
    uri = ("--tracking-uri", tracker.tracking_uri)
    job = ["--model", "models:/test/1", "--results", str(more), *uri]
    assert run_register_job(job, about=None) == 0
    written = (folder / "README.md").stat().st_mtime_ns
    assert put(folder, tracker, results) == made
    assert (folder / "README.md").stat().st_mtime_ns == written
    assert [v.version for v in client.search_model_versions()] == [1]
    version = get_version(client, ModelReference("test", 1, None))
    assert [s.value for s in read_scores(client, version)] == [0.5, 0.25]
    assert "| Classification | 1 | 0.2500 |" in version.description


def registered_folder(tracker, version):
    model_id = client_of(tracker).get_model_version("test", str(version)).tags[MODEL_ID_TAG]
    place = client_of(tracker).get_logged_model(model_id).artifact_location
    (folder,) = (Path(url2pathname(urlsplit(place).path)) / "artifacts").iterdir()
    return folder


def test_every_version_has_a_proof(folder, tracker):
    weights = weights_fingerprint(folder)
    kept = registered_folder(tracker, put(folder, tracker).version)
    proof = read_proof(kept)
    assert proof.weights == weights == weights_fingerprint(kept)
    assert not (folder / "proof").exists()  # of others, which stays as it is


def test_a_folder_of_others_has_a_proof_of_what_sentence_transformers_gives(tmp_path, tracker):
    modules = [Transformer(str(save_encoder(tmp_path / "encoder"))), Pooling(32, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "theirs"))
    job = ["--model", str(tmp_path / "theirs"), "--name", "test"]
    assert run_register_job([*job, "--tracking-uri", tracker.tracking_uri], about=None) == 0
    kept = registered_folder(tracker, 1)
    proof = read_proof(kept)
    loaded = SentenceTransformer(str(kept), device="cpu")
    found = check(proof, lambda texts: loaded.encode([text.text for text in texts]))
    assert found.same
    assert found.lengths.max() > 1.1  # without a Normalize module
    assert "no_normalisation" not in {mistake.name for mistake in proof.mistakes}


def test_a_card_that_is_written_later_has_what_was_recorded(folder, tmp_path, monkeypatch):
    """MLflow's `run.yaml` names the base model's folder by its last part: it tells neither the
    fingerprint nor where the licence stands.
    """
    for place, licence in ((tmp_path / "base", "mit"), (tmp_path / "other" / "base", "gpl-3.0")):
        place.mkdir(parents=True)
        (place / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    run = override(run_over("articles.json"), [f"model.backbone.path={tmp_path / 'base'}"])
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker.open_for_run(run, uri, tmp_path / "run", {})
    tracker.log_resolved_run(run.published())
    register_trained(Training(run, {}, ""), str(folder), tracker, None)
    assert tracker.close("FINISHED")
    first = (folder / "README.md").read_text()
    monkeypatch.chdir(tmp_path / "other")
    revision = f"{weights_fingerprint(folder)}-aaaaaaaa"
    results = write_results(tmp_path / "out" / revision, {DESCRIPTION: 0.5})
    card = tmp_path / "card.md"
    job = ["--model", "models:/test/1", "--results", str(results), "--card", str(card)]
    assert run_register_job([*job, "--tracking-uri", uri], about=None) == 0
    later = card.read_text()
    for text in (first, later):
        assert f"fingerprint `{run.fingerprint}`" in text
        assert "license: mit" in text
        assert "gpl" not in text
    read = training_run(client_of(tracker), tracker.run_id)
    assert read.fingerprint != run.fingerprint, "the control"


def test_a_run_without_scores_is_registered_without_an_alias(folder, tracker):
    made = put(folder, tracker)
    assert made.alias_uri == made.uri == "models:/test/1"
    client = client_of(tracker)
    assert dict(client.get_registered_model("test").aliases) == {}
    card = (folder / "README.md").read_text()
    assert "rayembed evaluate --model models:/test/VERSION --benchmark NanoBEIR" in card
    assert "@candidate" not in card
    description = without_check(client.get_model_version("test", "1").description)
    assert description == card.partition("\n---\n")[2].strip()


@pytest.mark.parametrize(
    ("share", "told"), [(0.0, "Not trained: it is "), (0.25, "A mixture of weights: 25% of ")]
)
def test_a_kept_start_or_mixture_is_called_so_now_and_when_it_is_scored_later(
    folder, tracker, tmp_path, share, told
):
    revision = f"{weights_fingerprint(folder)}-aaaaaaaa"
    put(folder, tracker, write_results(tmp_path / "out" / revision, {DESCRIPTION: 0.5}), share)
    client = client_of(tracker)
    version = client.get_model_version("test", "1")
    assert told in version.description
    assert told in (folder / "README.md").read_text()
    model = client.get_logged_model(version.tags["rayembed.model_id"])
    steps = run_over("articles.json").total_steps if share else 0
    assert {metric.step for metric in model.metrics} == {steps}
    more = write_results(tmp_path / "more" / revision, {TOPICS: 0.25})
    job = ["--model", "models:/test/1", "--results", str(more)]
    assert run_register_job([*job, "--tracking-uri", tracker.tracking_uri], about=None) == 0
    again = client.get_model_version("test", "1").description
    assert told in again
    assert "| Classification | 1 | 0.2500 |" in again


def test_nothing_is_registered_with_other_scores_or_weights_that_are_not_finite(
    folder, tracker, tmp_path
):
    other = write_results(tmp_path / "out" / ("0" * 12 + "-aaaaaaaa"), {DESCRIPTION: 0.5})
    with pytest.raises(ArtifactError, match="with the weights 000000000000, but this model has"):
        put(folder, tracker, other)
    (path,) = folder.rglob("*.safetensors")
    tensors = safetensors.torch.load_file(path)
    whole = dict(tensors)
    tensors[min(tensors)].view(-1)[0] = torch.nan
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ArtifactError, match="not finite"):
        put(folder, tracker)
    assert client_of(tracker).search_registered_models() == []
    tensors = {name: torch.nan_to_num(tensor) for name, tensor in whole.items()}
    safetensors.torch.save_file(tensors, path)
    assert put(folder, tracker).version == 1  # the control
