"""Models of MLflow's registry as models under evaluation."""

import pickle

import mteb
import numpy as np
import pytest
from mlflow import MlflowClient
from mteb.types import PromptType
from registered import register
from tiny_models import save_encoder

from rayembed.config.backbone import BackboneConfig
from rayembed.config.evaluation import ModelUnderTest
from rayembed.errors import ArtifactError, ConfigError, TrackingError
from rayembed.evaluation.run_scores import make_spec
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import weights_fingerprint
from rayembed.registry import registered_model
from rayembed.registry.registered_model import find_folder, pinned_reference
from rayembed.registry.tracking import Tracker
from rayembed.registry.tracking_uri import resolve_tracking_uri

SCIFACT = mteb.get_task("SciFact").metadata


@pytest.fixture(scope="module")
def tracker(tmp_path_factory):
    # The other folder's name is what the first one's would be if it were taken for a part of a URL.
    folder = tmp_path_factory.mktemp("storage") / "a%20b?c#d"
    (folder.parent / "a b?c#d").mkdir()
    return Tracker.open(
        resolve_tracking_uri(None, str(folder)),
        "tests",
        "run",
        "abcabcabcabc",
        {},
        {},
        folder=folder / "run",
        total_steps=7,
    )


def export(folder, seed):
    save_encoder(folder / "backbone", seed=seed)
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="none", dtype="float32"),
        query_prefix="query: ",
        query_max_length=40,
        document_max_length=40,
    )
    build_model(config, folder / "backbone", seed=0).save(folder / "exported")
    return folder / "exported"


@pytest.fixture(scope="module")
def folders(tracker, tmp_path_factory):
    """Two versions, the second of which is the champion."""
    made = [export(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in (0, 1)]
    for folder in made:
        register(
            folder,
            "tiny",
            tracker=tracker,
            weights_fingerprint=weights_fingerprint(folder),
            dimensions=(32,),
            instruction_template=None,
            global_step=7,
            alias="champion",
        )
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_registered_folder_is_evaluated(folders, tracker, cache):
    uri = tracker.tracking_uri
    settings = ModelUnderTest(reference="models:/tiny@champion")
    spec = pickle.loads(pickle.dumps(make_spec(settings, tracking_uri=uri)))
    assert spec.reference == "models:/tiny/2"
    assert spec.meta.name == "rayembed/tiny"
    assert spec.weights == weights_fingerprint(folders[1])
    encode_spec = spec.encode_spec(SCIFACT, PromptType.query)
    found = spec.load("cpu")(["are cats larger"], encode_spec)
    direct = make_spec(ModelUnderTest(reference=str(folders[1])))
    assert direct.encode_spec(SCIFACT, PromptType.query) == encode_spec
    np.testing.assert_array_equal(direct.load("cpu")(["are cats larger"], encode_spec), found)
    first = make_spec(ModelUnderTest(reference="models:/tiny/1"), tracking_uri=uri)
    assert first.weights == weights_fingerprint(folders[0])
    assert first.meta.revision != spec.meta.revision
    fetched = sorted(path.name for path in (cache / "mlflow").iterdir() if path.is_dir())
    assert [name.split("-")[1:3] for name in fetched] == [["tiny", "1"], ["tiny", "2"]]


def test_it_is_fetched_once_and_without_the_code_around_it(folders, tracker, monkeypatch):
    folder = find_folder("models:/tiny/2", tracker.tracking_uri)
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in folders[1].iterdir()}

    def fail(*_arguments):
        raise AssertionError("fetched again")

    monkeypatch.setattr(registered_model, "_artifacts", fail)
    assert find_folder("models:/tiny@champion", tracker.tracking_uri) == folder


def test_an_alias_that_moves_leaves_a_running_evaluation_alone(folders, tracker):
    uri = tracker.tracking_uri
    spec = make_spec(ModelUnderTest(reference="models:/tiny@champion"), tracking_uri=uri)
    client = MlflowClient(uri, uri)
    client.set_registered_model_alias("tiny", "champion", "1")
    try:
        assert pinned_reference("models:/tiny@champion", uri) == "models:/tiny/1"
        spec.load("cpu")
    finally:
        client.set_registered_model_alias("tiny", "champion", "2")


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("models:/tiny@nobody", ArtifactError, "'tiny' has no alias 'nobody'"),
        ("models:/nobody@champion", ArtifactError, "no registered model 'nobody'"),
        ("models:/tiny/9", ArtifactError, "'tiny' has no version 9"),
        ("models:/tiny", ConfigError, "write models:/name@alias or models:/name/version"),
        ("models:/tiny/Production", ConfigError, "cannot read the registered model"),
    ],
)
def test_references_that_lead_nowhere(folders, tracker, reference, error, message):
    with pytest.raises(error, match=message):
        make_spec(ModelUnderTest(reference=reference), tracking_uri=tracker.tracking_uri)


def test_without_mlflow(folders, tracker, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = ModelUnderTest(reference="models:/tiny/1")
    with pytest.raises(ConfigError, match="no tracking address is set"):
        make_spec(settings)
    with pytest.raises(TrackingError, match="no MLflow server"):
        make_spec(settings, tracking_uri="http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.tracking_uri)
    assert make_spec(settings).reference == "models:/tiny/1"


def test_a_model_that_others_registered_is_refused(tracker, tmp_path):
    """One without a folder of ours inside."""
    import mlflow.pyfunc

    class Echo(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input, params=None):
            return model_input

    mlflow.pyfunc.save_model(tmp_path / "echo", python_model=Echo(), pip_requirements=[])
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    client.create_registered_model("echo")
    client.create_model_version("echo", str(tmp_path / "echo"))
    with pytest.raises(ArtifactError, match="names no artifact 'model'"):
        find_folder("models:/echo/1", tracker.tracking_uri)


def test_weights_that_changed_in_the_cache_are_refused(folders, tracker, cache):
    spec = make_spec(ModelUnderTest(reference="models:/tiny/1"), tracking_uri=tracker.tracking_uri)
    (settings,) = cache.rglob("tokenizer_config.json")
    text = settings.read_text()
    settings.write_text(text.replace("[UNK]", "[PAD]", 1))
    with pytest.raises(ArtifactError, match="give all machines the same"):
        spec.load("cpu")
