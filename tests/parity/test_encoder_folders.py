"""Folders of sentence-transformers, as it saves them: its vectors against ours, mode by mode."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tiny_models import metaspace_tokenizer, save_decoder, save_encoder
from tokenizers import processors

from rayembed.config.backbone import BackboneConfig, EosPooling, ProjectionConfig
from rayembed.errors import ArtifactError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.passes.encoding import encode

TASK = "Instruct: Given a question, retrieve passages that answer it\nQuery: "
TEXTS = [
    "Paris",
    "are cats larger than dogs and where do they live",
    "7 wonders",
    "the quick brown fox jumps over the lazy dog " * 4,  # longer than the maximum
    *("the world " * i + "fox" for i in range(1, 7)),
]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TOLERANCE = 1e-5
"""Of unit vectors in fp32: sums run over other numbers of padded tokens."""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A Mistral whose tokenizer ends texts with EOS and pads with it, on the left."""
    tokenizer = metaspace_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
    tokenizer.model_max_length = 40
    folder = tmp_path_factory.mktemp("decoder")
    return save_decoder(folder, "mistral", sliding_window=None, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def put(folder, transformer, mode, *behind, **settings):
    """A folder that sentence-transformers saved."""
    modules = [Transformer(str(transformer)), Pooling(32, mode), *behind, Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", **settings)
    model.save(str(folder))
    return folder


def write_old_keys(folder, mode):
    """The pooling settings as published teachers have them."""
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    settings = {f"pooling_mode_{name}": name == mode for name in modes}
    path = folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps({"word_embedding_dimension": 32, **settings}))
    transformer = folder / "sentence_bert_config.json"
    transformer.write_text('{"max_seq_length": 40, "do_lower_case": false}')


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_last_token_of_a_causal_decoder(tmp_path, decoder):
    """The form of intfloat/e5-mistral-7b-instruct, its prompts among the settings."""
    folder = put(tmp_path / "teacher", decoder, "lasttoken", prompts={"query": TASK})
    written = {"new": load_model(folder)}
    write_old_keys(folder, "lasttoken")
    written["old"] = load_model(folder)
    check_loadable(folder)
    reference = SentenceTransformer(str(folder), device="cpu")
    for form, model in written.items():
        assert model.config.pooling == EosPooling(), form
        for side in ("left", "right"):
            reference.tokenizer.padding_side = side
            for batch_size, tokens in ((1, 64), (3, 1000), (10, 100)):
                found = encode(model, TEXTS, role="document", tokens_per_batch=tokens)
                expected = reference.encode_document(TEXTS, batch_size=batch_size)
                np.testing.assert_allclose(found, expected, atol=TOLERANCE)
                found = encode(model, TEXTS, role="query", tokens_per_batch=tokens)
                expected = reference.encode_query(TEXTS, batch_size=batch_size)
                np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    # The controls: the other pooling, and a decoder that sees later tokens.
    mean = load_model(put(tmp_path / "mean", decoder, "mean"))
    last = encode(written["old"], TEXTS, role="document")
    assert np.abs(encode(mean, TEXTS, role="document") - last).max() > 1e-2
    change(folder / "config.json", is_causal=False)
    both_ways = load_model(folder)
    assert np.abs(encode(both_ways, TEXTS, role="document") - last).max() > 1e-2


def test_eos_that_the_tokenizer_settings_state_is_there(tmp_path):
    """As published: `tokenizer.json` puts BOS alone, `tokenizer_config.json` asks for EOS."""
    tokenizer = metaspace_tokenizer(add_bos=True)
    tokenizer.pad_token, tokenizer.model_max_length = "</s>", 40
    bare = save_decoder(tmp_path / "bare", "mistral", sliding_window=None, tokenizer=tokenizer)
    folder = put(tmp_path / "teacher", bare, "lasttoken")
    without = encode(load_model(folder), TEXTS, role="query")
    change(folder / "tokenizer_config.json", add_eos_token=True)
    model = load_model(folder)
    ids = model.tokenizer(TEXTS, "query")
    assert {int(one["input_ids"][0]) for one in ids} == {1}
    assert {int(one["input_ids"][-1]) for one in ids} == {2}
    found = encode(model, TEXTS, role="query")
    assert np.abs(found - without).max() > 1e-2
    told = {"add_eos_token": True, "add_bos_token": True}
    reference = SentenceTransformer(str(folder), device="cpu", processor_kwargs=told)
    np.testing.assert_allclose(found, reference.encode(TEXTS), atol=TOLERANCE)
    model.save(tmp_path / "ours")
    again = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), found, atol=TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_every_mode_and_saved_again(tmp_path, request, family, mode):
    folder = put(tmp_path / "theirs", request.getfixturevalue(family), mode)
    reference = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=4)
    model = load_model(folder)
    found = encode(model, TEXTS, role="document", tokens_per_batch=100)
    np.testing.assert_allclose(found, reference, atol=TOLERANCE)
    model.save(tmp_path / "ours")
    again = SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(again, reference, atol=TOLERANCE)
    again = encode(load_model(tmp_path / "ours"), TEXTS, role="query")
    np.testing.assert_allclose(again, reference, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_dense_modules(tmp_path, encoder, form):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        behind = [
            Dense(32, 24, bias=False, activation_function=torch.nn.Identity()),
            Dense(24, 16),  # tanh
        ]
    folder = put(tmp_path / "theirs", encoder, "cls", *behind)
    if form == "bin":
        for name, dense in zip(("2_Dense", "3_Dense"), behind, strict=True):
            (folder / name / "model.safetensors").unlink()
            torch.save(dense.state_dict(), folder / name / "pytorch_model.bin")
    check_loadable(folder)
    model = load_model(folder)
    assert model.dimensions == (16,)
    reference = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encode(model, TEXTS, role="query"), reference, atol=TOLERANCE)
    model.save(tmp_path / "ours")
    again = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), reference, atol=TOLERANCE)
    again = load_model(tmp_path / "ours")
    np.testing.assert_allclose(encode(again, TEXTS, role="query"), reference, atol=TOLERANCE)
    # The control: a Dense that is left out shows.
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[i] for i in (0, 1, 4)]))
    assert encode(load_model(folder), TEXTS, role="query").shape[1] == 32


def test_projections_are_trained_and_exported(tmp_path, decoder):
    """From settings: a decoder without a token for padding, last token, one projection."""
    bare = save_decoder(tmp_path / "bare", "mistral", tokenizer=metaspace_tokenizer(add_bos=True))
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused", dtype="float32"),
        pooling=EosPooling(),
        projections=(ProjectionConfig(width=8, activation="gelu"),),
        query_max_length=40,
        document_max_length=40,
    )
    model = build_model(config, bare, seed=3)
    tokens = model.tokenizer(TEXTS, "query")
    model(model.tokenizer.collate(tokens)).embeddings[:, 0].sum().backward()
    gradient = model.pooling.projections[0].linear.weight.grad
    assert float(gradient.abs().max()) > 0
    assert not model.backbone_parameter("pooling.projections.0.linear.weight")
    expected = encode(model, TEXTS, role="query")
    assert expected.shape == (len(TEXTS), 8)
    model.save(tmp_path / "model")
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(loaded.encode(TEXTS, batch_size=5), expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"pools by \['cls', 'mean'\]"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "supported is exactly one of"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt=False"),
        ("1_Pooling/config.json", {"pooling_mode": "mean_sqrt_len_tokens"}, "followed by a Dense"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.SELU"}, "torch.nn.SELU"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual=True"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name="),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "only 'feature"),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}, "do_lower_case='yes'"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "chat template"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "manhattan"}, "'manhattan'"),
    ],
)  # fmt: skip
def test_what_would_give_other_vectors_is_refused(tmp_path, encoder, file, values, message):
    folder = put(tmp_path / "theirs", encoder, "mean", Dense(32, 16))
    check_loadable(folder)
    change(folder / file, **values)
    for load in (check_loadable, load_model):
        with pytest.raises(ArtifactError, match=message):
            load(folder)


def test_order_weights_and_scale_count(tmp_path, encoder):
    folder = put(tmp_path / "theirs", encoder, "mean", Dense(32, 16))
    modules = json.loads((folder / "modules.json").read_text())

    def refused(message):
        for load in (check_loadable, load_model):
            with pytest.raises(ArtifactError, match=message):
                load(folder)

    (folder / "modules.json").write_text(json.dumps([*modules[:2], modules[3], modules[2]]))
    refused("in this order")
    (folder / "modules.json").write_text(json.dumps(modules[:3]))
    change(folder / "config_sentence_transformers.json", similarity_fn_name="dot")
    refused("'dot' without normalising")
    (folder / "modules.json").write_text(json.dumps(modules))
    check_loadable(folder)
    weights = folder / "2_Dense" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(ArtifactError, match="cannot load the Dense module"):
        load_model(folder)
    weights.unlink()
    refused("no weights in .*2_Dense")
