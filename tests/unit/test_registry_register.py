import base64
import json
import re

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow_uris import mlflow_at
from registered import register

from rayembed.errors import TrackingError
from rayembed.machine.quantisation import to_bits, to_int8
from rayembed.registry import register as module
from rayembed.registry.mlflow_run import FINGERPRINT_TAG, find_model_versions, find_run, quoted
from rayembed.registry.register import MODEL_ID_TAG, TASK, WEIGHTS_TAG
from rayembed.registry.tracking import Tracker

TEXTS = ["red fox", "blue whale in the sea", "a fox"]
TEMPLATE = "task {instruction} : "
WORDS = ["red", "fox", "blue", "whale", "in", "the", "sea", "a", "task", "query", ":", "find"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random BERT of width 8 in the sentence-transformers format, with a query prompt."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed

    root = tmp_path_factory.mktemp("model")
    words = root / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    set_seed(3)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(root / "bert")
    BertTokenizerFast(vocab_file=str(words), vocab=str(words)).save_pretrained(root / "bert")
    transformer = Transformer(str(root / "bert"))
    model = SentenceTransformer(
        modules=[transformer, Pooling(8, "mean"), Normalize()],
        prompts={"query": "query : ", "document": ""},
        device="cpu",
    )
    model.save(str(root / "exported"))
    return root / "exported"


@pytest.fixture(scope="module")
def tracker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield Tracker.open(
            f"sqlite:///{folder / 'mlflow.db'}",
            "tests",
            "run",
            "abcabcabcabc",
            {},
            {},
            folder=folder / "run",
            total_steps=7,
        )


def put(folder, tracker, name="tiny", **changes):
    arguments = {
        "tracker": tracker,
        "weights_fingerprint": "111111111111",
        "dimensions": (8, 4),
        "instruction_template": TEMPLATE,
        "global_step": 7,
    }
    return register(folder, name, **{**arguments, **changes})


@pytest.fixture(scope="module")
def registered(folder, tracker):
    return put(folder, tracker)


@pytest.fixture(scope="module")
def loaded(registered, tracker):
    import mlflow

    with mlflow_at(tracker.tracking_uri):
        yield mlflow.pyfunc.load_model("models:/tiny@candidate")


@pytest.fixture(scope="module")
def reference(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def vectors(answer):
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)


def test_version_has_alias_and_tags_of_its_model(registered, tracker):
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    assert (registered.name, registered.version) == ("tiny", 1)
    assert registered.uri == "models:/tiny/1"
    assert registered.alias_uri == "models:/tiny@candidate"
    version = client.get_model_version_by_alias("tiny", "candidate")
    assert int(version.version) == 1
    assert version.run_id == tracker.run_id
    assert version.tags == {
        "rayembed.fingerprint": "abcabcabcabc",
        WEIGHTS_TAG: "111111111111",
        MODEL_ID_TAG: version.tags[MODEL_ID_TAG],
    }
    logged = client.get_logged_model(version.tags[MODEL_ID_TAG])
    assert json.loads(logged.tags["mlflow.modelVersions"]) == [{"name": "tiny", "version": 1}]
    assert str(logged.status) == "READY"
    # The run is still the one that the tracker has open.
    assert client.get_run(tracker.run_id).info.status == "RUNNING"


def test_vectors_are_those_of_sentence_transformers(loaded, reference):
    answer = loaded.predict({"input": TEXTS})
    np.testing.assert_array_equal(vectors(answer), reference.encode_document(TEXTS))
    assert loaded.metadata.metadata == {"task": TASK}
    assert answer["object"] == "list"
    assert answer["model"] == "tiny"
    assert [(i["object"], i["index"]) for i in answer["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
        ("embedding", 2),
    ]
    # Words and, for each text, [CLS] and [SEP].
    assert answer["usage"] == {"prompt_tokens": 2 + 5 + 2 + 6, "total_tokens": 15}


def test_one_text_and_tables_are_taken(loaded, reference):
    one = vectors(loaded.predict({"input": "red fox"}))
    np.testing.assert_array_equal(one, reference.encode_document(["red fox"]))
    table = pd.DataFrame(
        {"input": ["red fox", ["a fox", "the sea"]], "role": ["query", None]}, dtype=object
    )
    both = vectors(loaded.predict(table))
    np.testing.assert_array_equal(both[:1], reference.encode_query(["red fox"]))
    np.testing.assert_array_equal(both[1:], reference.encode_document(["a fox", "the sea"]))


def test_role_and_instruction_change_the_vectors(loaded, reference):
    document = vectors(loaded.predict({"input": TEXTS}))
    query = loaded.predict({"input": TEXTS, "role": "query"})
    told = loaded.predict({"input": TEXTS, "role": "query", "instruction": "find"})
    np.testing.assert_array_equal(vectors(query), reference.encode_query(TEXTS))
    np.testing.assert_array_equal(
        vectors(told), reference.encode_query(TEXTS, prompt="task find : ")
    )
    assert np.abs(vectors(query) - document).max() > 1e-3
    assert np.abs(vectors(told) - vectors(query)).max() > 1e-3
    # `query :` is two tokens, `task find :` three.
    assert query["usage"]["prompt_tokens"] == 15 + 3 * 2
    assert told["usage"]["prompt_tokens"] == 15 + 3 * 3


def test_dimensions_are_cut_and_of_unit_length_again(loaded):
    full = vectors(loaded.predict({"input": TEXTS}))
    cut = vectors(loaded.predict({"input": TEXTS, "dimensions": 4}))
    assert cut.shape == (3, 4)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        cut, full[:, :4] / np.linalg.norm(full[:, :4], axis=1, keepdims=True), rtol=1e-6
    )


def test_base64_holds_the_same_numbers(loaded):
    plain = vectors(loaded.predict({"input": "red fox"}))
    packed = loaded.predict({"input": "red fox", "encoding_format": "base64"})
    text = packed["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), plain[0])


def test_small_vectors_are_those_of_the_server(loaded):
    plain = vectors(loaded.predict({"input": TEXTS}))
    for name, stored in (
        ("int8", to_int8(plain)),
        ("uint8", to_int8(plain) + np.int16(128)),
        ("binary", to_bits(plain) - np.int16(128)),
        ("ubinary", to_bits(plain)),
    ):
        answer = loaded.predict({"input": TEXTS, "encoding_format": name})
        assert [item["embedding"] for item in answer["data"]] == stored.tolist()


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({"input": []}, "list of texts, not empty"),
        ({"input": ["red", " "]}, "input[1] is an empty text"),
        ({"input": [1, 2]}, "token ids are not accepted"),
        ({"input": "fox", "role": "passage"}, "role = 'passage'; allowed: query, document"),
        ({"input": "fox", "dimensions": 5}, "dimensions = 5; allowed for this model: [8, 4]"),
        ({"input": "fox", "encoding_format": "int4"}, "encoding_format = 'int4'; allowed: float,"),
    ],
)
def test_wrong_requests_are_refused(loaded, request_body, message):
    with pytest.raises(MlflowException, match=re.escape(message)) as caught:
        loaded.predict(request_body)
    assert caught.value.get_http_status_code() == 400


def test_served_model_answers_the_openai_body(loaded, reference):
    """What `mlflow models serve` does at /invocations, without its process."""
    from mlflow.pyfunc.scoring_server import invocations

    body = {"input": TEXTS, "model": "tiny", "role": "query", "dimensions": 8, "user": "u"}
    schema = loaded.metadata.get_input_schema()
    answer = invocations(json.dumps(body), "application/json", loaded, schema)
    assert answer.status == 200
    np.testing.assert_array_equal(
        vectors(json.loads(answer.response)), reference.encode_query(TEXTS)
    )


def test_same_weights_make_no_second_version(folder, tracker, registered):
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    again = put(folder, tracker)
    assert again == registered
    assert len(client.search_model_versions("name='tiny'")) == 1
    # Killed between sending and registering: the model that was sent is taken.
    client.delete_registered_model("tiny")
    after = put(folder, tracker)
    assert after.version == 1
    assert len(client.search_logged_models([tracker.experiment_id])) == 1
    # Other weights are another version, and the alias goes with them.
    other = put(folder, tracker, weights_fingerprint="222222222222")
    assert other.version == 2
    assert client.get_model_version_by_alias("tiny", "candidate").version == 2
    assert sorted(p.name for p in folder.parent.iterdir() if p.name.startswith(".mlflow")) == []


def test_the_same_weights_registered_twice_at_once_are_one_version(folder, tracker, monkeypatch):
    """Another process is faster, between this one's look and its version."""
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    log_model, numbers = module._log_model, []

    def slower(*arguments):
        monkeypatch.setattr(module, "_log_model", log_model)
        made = log_model(*arguments)
        numbers.append(put(folder, tracker, name="twice", weights_fingerprint="333").version)
        return made

    monkeypatch.setattr(module, "_log_model", slower)
    # Else the other process's look finds the model that this one has sent.
    monkeypatch.setattr(module, "_find_logged_model", lambda *_: None)
    numbers.append(put(folder, tracker, name="twice", weights_fingerprint="333").version)
    assert numbers == [1, 1]
    assert len(client.search_model_versions("name='twice'")) == 1
    names = {model.name for model in client.search_registered_models()}
    assert not any("being" in name for name in names)


@pytest.mark.parametrize("name", ["it's", 'a"b', "plain"])
def test_names_with_a_quote_are_found_by_filters(tracker, name):
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    client.create_registered_model(name)
    client.create_model_version(name, "/nowhere")
    assert [v.name for v in find_model_versions(client, name)] == [name]
    run = client.create_run(tracker.experiment_id, run_name=name, tags={FINGERPRINT_TAG: "f"})
    found = find_run(client, "tests", tracker.experiment_id, name, "f")
    assert found == run.info.run_id


def test_a_name_with_both_quotes_is_told_to_be_none():
    with pytest.raises(TrackingError, match=r"cannot search for .* holds both ' and "):
        quoted("""it's "so\"""")


def test_nvembed_export_gives_the_vectors_of_its_own_encoder(tracker, tmp_path, loaded):
    """The model class of rayembed, its instruction kept out of the pool, through MLflow."""
    import mlflow
    from tiny_models import save_decoder

    from rayembed.config.settings import parse
    from rayembed.models.loading.build import build_model
    from rayembed.models.nvembed.config import NVEmbedConfig
    from rayembed.models.passes.encoding import encode

    backbone = save_decoder(tmp_path / "decoder")
    config = parse(
        NVEmbedConfig,
        {
            "backbone": {"path": str(backbone), "dtype": "float32"},
            "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
        },
    )
    model = build_model(config, backbone, seed=1).eval()
    model.save(tmp_path / "exported")
    version = register(
        tmp_path / "exported",
        "nvembed",
        tracker=tracker,
        weights_fingerprint="333333333333",
        dimensions=model.dimensions,
        instruction_template=config.instruction_template,
        global_step=7,
    )
    served = mlflow.pyfunc.load_model(version.alias_uri)
    texts = ["Paris is the capital of France", "the quick brown fox"]
    told = {"input": texts, "role": "query", "instruction": "find a city"}
    # Other batches pad otherwise, which moves float32 sums in the last digits.
    np.testing.assert_allclose(
        vectors(served.predict(told)),
        encode(model, texts, role="query", instruction="find a city"),
        atol=1e-6,
    )
    np.testing.assert_allclose(
        vectors(served.predict({"input": texts})), encode(model, texts, role="document"), atol=1e-6
    )
    assert served.predict(told)["usage"]["prompt_tokens"] > 0


def test_biencoder_takes_an_instruction_as_plain_text(tracker, tmp_path, loaded, recwarn):
    """After the prefix, as its tokenizer has it; and MLflow has nothing to say about the code."""
    import mlflow
    from tiny_models import save_encoder

    from rayembed.config.backbone import BackboneConfig
    from rayembed.models.biencoder.config import BiEncoderConfig
    from rayembed.models.loading.build import build_model
    from rayembed.models.passes.encoding import encode

    encoder = save_encoder(tmp_path / "encoder")
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused", dtype="float32"),
        query_prefix="where ",
        document_prefix="the world ",
        query_max_length=20,
        document_max_length=20,
    )
    model = build_model(config, encoder, seed=1).eval()
    model.save(tmp_path / "exported")
    version = register(
        tmp_path / "exported",
        "biencoder",
        tracker=tracker,
        weights_fingerprint="444444444444",
        dimensions=model.dimensions,
        instruction_template=None,
        global_step=7,
    )
    served = mlflow.pyfunc.load_model(version.alias_uri)
    assert not [w for w in recwarn if "type hints" in str(w.message)]
    assert served.metadata.signature == loaded.metadata.signature
    texts = ["Paris is the capital of France", "the quick brown fox"]
    plain = vectors(served.predict({"input": texts, "role": "query"}))
    np.testing.assert_allclose(plain, encode(model, texts, role="query"), atol=1e-6)
    for role in ("query", "document"):
        told = {"input": texts, "role": role, "instruction": "the capital"}
        np.testing.assert_allclose(
            vectors(served.predict(told)),
            encode(model, texts, role=role, instruction="the capital"),
            atol=1e-6,
        )
        assert np.abs(vectors(served.predict(told)) - plain).max() > 1e-3
