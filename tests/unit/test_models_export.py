import json
import shutil

import numpy as np
import pytest
import safetensors
import torch
from sentence_transformers import SentenceTransformer
from tiny_models import save_decoder, save_encoder
from transformers import AutoModel

from rayembed.config.backbone import (
    BackboneConfig,
    ClsPooling,
    EosPooling,
    LatentAttentionPooling,
    MeanPooling,
    SelfAttentionPooling,
)
from rayembed.errors import ArtifactError, StorageFullError
from rayembed.models.biencoder.architecture import BiEncoder
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import read_header, weights_fingerprint
from rayembed.models.loading.load import load_model, saved_dtype
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.nvembed.model import NVEmbed
from rayembed.models.passes.encoding import encode
from rayembed.models.sentence_module import as_sentence_transformer

TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris", ""]
TASK = "Given a question, retrieve passages that answer it"
LATENT = LatentAttentionPooling(num_latents=4, num_heads=2, mlp_ratio=2)


def trained(config, folder):
    """A model whose adapters and pooling are no longer what they were built as."""
    model = build_model(config, folder, seed=0)
    g = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    return model.eval()


def nvembed_config(**changes):
    backbone = BackboneConfig(path="unused", dtype="float32")
    return NVEmbedConfig(**({"backbone": backbone, "pooling": LATENT} | changes))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return save_decoder(tmp_path_factory.mktemp("decoder"), "mistral")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def vectors(model, role, instruction=""):
    return encode(model, TEXTS, role=role, instruction=instruction, allow_empty=True)


def sentence_transformer(folder):
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(
    "config",
    [
        nvembed_config(),
        nvembed_config(mask="causal", pooling=EosPooling()),
        nvembed_config(pooling=MeanPooling(), lora=None),
        nvembed_config(pooling=SelfAttentionPooling(num_heads=4), query_max_length=40),
        nvembed_config(pooling=LATENT.model_copy(update={"form": "paper"})),
    ],
)
def test_nvembed_gives_the_same_vectors_everywhere(tmp_path, decoder, config):
    model = trained(config, decoder)
    folder = tmp_path / "model"
    model.save(folder, instructions={"Questions": TASK})
    query, document = vectors(model, "query", TASK), vectors(model, "document")

    again = load_model(folder)
    assert isinstance(again, NVEmbed)
    assert not again.training
    np.testing.assert_allclose(vectors(again, "query", TASK), query, atol=1e-5)
    np.testing.assert_allclose(vectors(again, "document"), document, atol=1e-5)

    prompt = f"Instruct: {TASK}\nQuery: "
    for loaded in (sentence_transformer(folder), as_sentence_transformer(folder)):
        for found, expected in (
            (loaded.encode(TEXTS, prompt=prompt), query),
            (loaded.encode(TEXTS, prompt_name="Questions"), query),
            (loaded.encode_query(TEXTS, prompt=prompt), query),
            (loaded.encode(TEXTS), document),
            (loaded.encode_document(TEXTS), document),
            (loaded.encode_query(TEXTS), vectors(model, "query")),
        ):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert loaded.get_embedding_dimension() == 32
    if not isinstance(config.pooling, EosPooling):
        # The control: as plain text the instruction is pooled, and the vectors are others.
        as_text = encode(model, [prompt + t for t in TEXTS], role="query")
        assert np.abs(as_text - query).max() > 1e-3


@pytest.mark.parametrize("pooling", [MeanPooling(), ClsPooling()])
@pytest.mark.parametrize("document_length", [20, 7])
def test_biencoder_gives_the_same_vectors_everywhere(tmp_path, encoder, pooling, document_length):
    """Plain sentence-transformers format, which reads as much of a document as of a query."""
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused", dtype="float32"),
        pooling=pooling,
        query_prefix="where ",
        document_prefix="the world ",
        query_max_length=20,
        document_max_length=document_length,
    )
    model = trained(config, encoder)
    folder = tmp_path / "model"
    model.save(folder)
    again = load_model(folder)
    assert isinstance(again, BiEncoder)
    assert "rayembed" not in (folder / "modules.json").read_text()
    loaded, kept = sentence_transformer(folder), as_sentence_transformer(folder, device="cpu")
    assert loaded.max_seq_length == 20
    in_full = trained(config.model_copy(update={"document_max_length": 20}), encoder)
    for role, found, of_own_length in (
        ("query", loaded.encode_query(TEXTS), kept.encode_query(TEXTS)),
        ("document", loaded.encode_document(TEXTS), kept.encode_document(TEXTS)),
    ):
        np.testing.assert_allclose(found, vectors(in_full, role), atol=1e-5)
        np.testing.assert_allclose(of_own_length, vectors(model, role), atol=1e-5)
        np.testing.assert_allclose(vectors(again, role), vectors(model, role), atol=1e-5)
    own, full = vectors(model, "document"), vectors(in_full, "document")
    differ = np.abs(own - full).max(axis=1) > 1e-3
    # The prefix takes two or three of the tokens, so that only "Paris" and "" fit into seven.
    assert differ.tolist() == [document_length == 7] * 2 + [False] * 2
    told = loaded.encode(TEXTS, prompt="where the capital ")
    np.testing.assert_allclose(told, vectors(model, "query", "the capital"), atol=1e-5)
    (folder / "rayembed.json").unlink()
    of_others = load_model(folder)
    assert of_others.config.pooling == pooling
    np.testing.assert_allclose(vectors(of_others, "query"), vectors(model, "query"), atol=1e-5)


def test_sentence_transformers_saves_and_loads_again(tmp_path, decoder):
    trained(nvembed_config(), decoder).save(tmp_path / "one")
    loaded = sentence_transformer(tmp_path / "one")
    loaded.save(str(tmp_path / "two"))
    again = sentence_transformer(tmp_path / "two")
    np.testing.assert_allclose(again.encode(TEXTS), loaded.encode(TEXTS), atol=1e-6)


def test_folder_holds_numbers_and_json_alone(tmp_path, decoder):
    trained(nvembed_config(), decoder).save(tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").rglob("*")}
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert {"rayembed.json", "modules.json", "pooling.safetensors", "tokenizer.json"} <= names
    settings = json.loads((tmp_path / "model" / "rayembed.json").read_text())
    assert settings["format_version"] == 2
    assert settings["model"]["lora"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_bfloat16_model_stays_bfloat16_and_can_be_widened(tmp_path, decoder):
    config = nvembed_config(backbone=BackboneConfig(path="unused", dtype="bfloat16"))
    model = trained(config, decoder)
    model.save(tmp_path / "model")
    again = load_model(tmp_path / "model", dtype="bfloat16")
    wide = load_model(tmp_path / "model")  # bfloat16 is emulated here
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    found = sentence_transformer(tmp_path / "model").encode(TEXTS)
    np.testing.assert_allclose(found, vectors(wide, "document"), atol=1e-5)
    # Merging rounds to bfloat16 what the adapter kept apart: 8 bits, unit vectors.
    assert (vectors(model, "document") * vectors(again, "document")).sum(1).min() > 0.997
    assert (vectors(wide, "document") * vectors(again, "document")).sum(1).min() > 0.997


def test_plain_format_computes_in_float32(tmp_path, encoder):
    """In sentence-transformers and transformers, whatever units the CPU has."""
    config = BiEncoderConfig(backbone=BackboneConfig(path="unused", dtype="bfloat16"))
    trained(config, encoder).save(tmp_path / "model")
    header = read_header(tmp_path / "model" / "model.safetensors")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert saved_dtype(tmp_path / "model") == "bfloat16"
    loaded = sentence_transformer(tmp_path / "model")
    bare = AutoModel.from_pretrained(tmp_path / "model")
    for module in (loaded, bare):
        assert {p.dtype for p in module.parameters()} == {torch.float32}
    wide = load_model(tmp_path / "model", dtype="float32")
    np.testing.assert_allclose(loaded.encode(TEXTS), vectors(wide, "document"), atol=1e-5)


def test_transformers_refuses_to_take_the_backbone_for_the_model(tmp_path, decoder, encoder):
    trained(nvembed_config(), decoder).save(tmp_path / "model")
    with pytest.raises(ValueError, match="model type `rayembed`"):
        AutoModel.from_pretrained(tmp_path / "model")
    config = BiEncoderConfig(backbone=BackboneConfig(path="unused", dtype="float32"))
    trained(config, encoder).save(tmp_path / "plain")
    assert AutoModel.from_pretrained(tmp_path / "plain").config.model_type == "bert"


def test_without_the_import_sentence_transformers_asks_for_the_flag(tmp_path, decoder, monkeypatch):
    trained(nvembed_config(), decoder).save(tmp_path / "model")
    # What a process has in which nobody imported rayembed's module.
    monkeypatch.setattr(SentenceTransformer, "_module_classes", {})
    with pytest.raises(ValueError, match="trust_remote_code"):
        sentence_transformer(tmp_path / "model")
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    expected = as_sentence_transformer(tmp_path / "model", device="cpu").encode(TEXTS)
    np.testing.assert_array_equal(loaded.encode(TEXTS), expected)


FULL = safetensors.SafetensorError("I/O error: No space left on device (os error 28)")


def test_failed_save_leaves_the_old_model(tmp_path, decoder, monkeypatch):
    model = trained(nvembed_config(), decoder)
    model.save(tmp_path / "model")
    before = weights_fingerprint(tmp_path / "model")

    def failing(error):
        def fail(*_, **__):
            raise error

        return fail

    for error, kind, told in (
        (OSError("the disk is broken"), OSError, "^the disk is broken$"),
        (FULL, StorageFullError, rf"no room to write '{tmp_path}/model'.*bytes are free there"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(model.tokenizer.pretrained, "save_pretrained", failing(error))
            with pytest.raises(kind, match=told):
                model.save(tmp_path / "model")
        assert weights_fingerprint(tmp_path / "model") == before
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model.save(tmp_path / "model")  # replacing is allowed
    assert weights_fingerprint(tmp_path / "model") == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    with pytest.raises(ArtifactError, match="files that are not a model"):
        model.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "x"


def cut_weights(folder):
    path = folder / "backbone" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def drop_a_pooling_weight(folder):
    import safetensors.torch

    state = safetensors.torch.load_file(folder / "pooling.safetensors")
    del state["latents"]
    safetensors.torch.save_file(state, folder / "pooling.safetensors")


def later_format(folder):
    path = folder / "rayembed.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut_weights, "cannot load the model"),
        (drop_a_pooling_weight, "latents"),
        (later_format, "format_version 3"),
        (lambda f: (f / "pooling.safetensors").unlink(), "cannot load the head"),
        (lambda f: (f / "rayembed.json").write_text("{"), "cannot read"),
        (lambda f: (f / "rayembed.json").write_text("[]"), "must hold a JSON object"),
        (lambda f: (f / "backbone/config.json").unlink(), "no transformers model"),
        (lambda f: (f / "backbone/model.safetensors").unlink(), "cannot load the model"),
        (lambda f: (f / "backbone/tokenizer.json").unlink(), "no tokenizer"),
        (shutil.rmtree, "no model in"),
    ],
)
def test_broken_folder_is_refused(tmp_path, decoder, harm, message):
    trained(nvembed_config(), decoder).save(tmp_path / "model")
    harm(tmp_path / "model")
    with pytest.raises(ArtifactError, match=message):
        load_model(tmp_path / "model")


def test_plain_encoder_is_taken_with_mean_pooling(encoder):
    model = load_model(encoder)
    assert model.config.pooling == MeanPooling()
    assert model.config.query_max_length == 64
    assert model.config.backbone.dtype == "float32"
    found = SentenceTransformer(str(encoder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(model, "document"), found, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("modules.json", "models.Normalize", "models.LSTM", "supported are"),
        ("1_Pooling/config.json", "mean_tokens", "max_token", "pooling_mode_max_token=True"),
        ("sentence_bert_config.json", "false", '"yes"', "do_lower_case='yes'"),
    ],
)
def test_modules_of_other_kinds_are_refused(tmp_path, encoder, file, old, new, message):
    config = BiEncoderConfig(backbone=BackboneConfig(path="unused", dtype="float32"))
    build_model(config, encoder, seed=0).save(tmp_path / "model")
    (tmp_path / "model" / "rayembed.json").unlink()
    path = tmp_path / "model" / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ArtifactError, match=message):
        load_model(tmp_path / "model")


def test_fingerprint_goes_by_content(tmp_path, encoder):
    one = weights_fingerprint(encoder)
    assert len(one) == 12
    assert set(one) <= set("0123456789abcdef")
    copy = tmp_path / "copy"
    shutil.copytree(encoder, copy)
    (copy / "README.md").write_text("a card")
    for name in ("training_args.bin", "optimizer.bin", "optimizer_1.bin", "scheduler.bin"):
        (copy / name).write_bytes(b"of the last training")
    assert weights_fingerprint(copy) == one
    (copy / "pytorch_model-00001-of-00002.bin").write_bytes(b"weights")
    assert weights_fingerprint(copy) != one
    (copy / "pytorch_model-00001-of-00002.bin").unlink()
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content + b" ")
        assert weights_fingerprint(copy) != one, name
        (copy / name).write_bytes(content)
    assert weights_fingerprint(copy) == one
    (copy / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="no weights"):
        weights_fingerprint(copy)
