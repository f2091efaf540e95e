"""The cross-encoder: scores of sentence-transformers, layouts of families, saved and loaded."""

import json
import logging

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from sentence_transformers import CrossEncoder as Theirs
from tiny_models import save_encoder
from tiny_scorers import FAMILIES, PAIRS, QUERY, save_scorer

from rayembed.config.settings import parse
from rayembed.data.mining.rescoring import check_cross_encoder
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.models.contract import trainable_state
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.load import check_loadable, load_model, settings_of
from rayembed.models.passes.encoding import encode
from rayembed_extras.reranking.architecture import CrossEncoderModel
from rayembed_extras.reranking.settings import CrossEncoderConfig
from rayembed_extras.reranking.tokens import cut_share

LENGTH = 48
HEAD = {
    f"backbone.{layer}.{kind}"
    for layer in ("classifier", "bert.pooler.dense")
    for kind in ("weight", "bias")
}
"""Weights of the layers that score, of BERT."""


def config(folder, **more):
    values = {"backbone": {"path": str(folder), "dtype": "float32"}, "document_max_length": LENGTH}
    return parse(CrossEncoderConfig, values | more)


@torch.no_grad()
def scores(model, pairs=PAIRS):
    """Scores of pairs, each beside all others, in one padded micro-batch."""
    return model(model.tokenizer.collate(model.tokenizer.of_pairs(pairs))).embeddings[:, 0].numpy()


def theirs(folder, pairs=PAIRS):
    """What sentence-transformers gives for pairs, before a sigmoid."""
    model = Theirs(str(folder), device="cpu", local_files_only=True)
    return model.predict(pairs, activation_fn=torch.nn.Identity())


def moved(model):
    """The model with other weights wherever it trains."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_layout_is_read_trained_and_saved_as_it_is(family, tmp_path):
    folder = save_scorer(tmp_path / "published", family)
    loaded = load_model(folder, dtype="float32")
    assert isinstance(loaded, CrossEncoderModel)
    np.testing.assert_allclose(scores(loaded), theirs(folder), atol=1e-5)
    assert np.ptp(scores(loaded)) > 0.01
    built = build_model(config(folder), folder, seed=0).eval()
    np.testing.assert_allclose(scores(built), scores(loaded), atol=1e-6)
    moved(built).save(tmp_path / "saved")
    expected = scores(built)
    assert np.abs(expected - scores(loaded)).max() > 1e-3
    for found in (scores(load_model(tmp_path / "saved")), theirs(tmp_path / "saved")):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    check_cross_encoder(tmp_path / "saved", "saved")
    own = json.loads((folder / "config.json").read_text())["architectures"]
    assert json.loads((tmp_path / "saved/config.json").read_text())["architectures"] == own
    assert not (tmp_path / "saved/modules.json").exists()
    assert type(settings_of(tmp_path / "saved")) is CrossEncoderConfig
    again = build_model(config(tmp_path / "saved"), tmp_path / "saved", seed=5).eval()
    np.testing.assert_allclose(scores(again), expected, atol=1e-6)


def test_the_settings_of_a_published_reranker_are_read_without_its_weights(tmp_path):
    folder = save_scorer(tmp_path / "published")
    found = settings_of(folder)
    assert (found.kind, found.document_max_length) == ("cross_encoder", LENGTH)
    meta = check_buildable(config(folder), folder)
    built = build_model(config(folder), folder, seed=0)
    assert {n: p.shape for n, p in meta.named_parameters()} == {
        n: p.shape for n, p in built.named_parameters()
    }
    assert {n for n, _ in built.named_parameters() if not built.backbone_parameter(n)} == HEAD


def test_an_encoder_gets_a_new_layer_and_says_so(tmp_path, caplog):
    folder = save_encoder(tmp_path / "encoder")
    with caplog.at_level(logging.WARNING, "rayembed_extras"):
        built = build_model(config(folder), folder, seed=1)
    assert "no trained layers that score pairs" in caplog.text
    assert "classifier.weight" in caplog.text
    again = build_model(config(folder), folder, seed=1)
    other = build_model(config(folder), folder, seed=2)
    np.testing.assert_array_equal(scores(built.eval()), scores(again.eval()))
    assert np.abs(scores(built) - scores(other.eval())).max() > 1e-6
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build_model(config(folder), save_scorer(tmp_path / "reranker"), seed=1)
    assert "random" not in caplog.text


def test_a_reranker_without_its_scoring_layer_gives_no_scores(tmp_path):
    folder = save_scorer(tmp_path / "reranker")
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    kept = {name: tensor for name, tensor in weights.items() if "classifier" not in name}
    assert len(kept) < len(weights)
    safetensors.torch.save_file(kept, path, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lacks 2 weights, such as 'classifier.bias'"):
        load_model(folder)


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    folder = save_scorer(tmp_path / "nli", labels=3)
    with pytest.raises(ConfigError, match="classifier of 3 labels"):
        check_buildable(config(folder), folder)


def test_adapters_change_nothing_at_first_and_are_merged_when_saved(tmp_path):
    folder = save_scorer(tmp_path / "published")
    lora = {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["query", "value"]}
    plain = build_model(config(folder), folder, seed=1).eval()
    adapted = build_model(config(folder, lora=lora), folder, seed=1).eval()
    np.testing.assert_allclose(scores(adapted), scores(plain), atol=1e-6)
    trained = trainable_state(adapted)
    head = {name for name in trained if "lora_" not in name}
    assert head == HEAD
    assert len(trained) > len(head)
    expected = scores(moved(adapted))
    adapted.save(tmp_path / "saved")
    np.testing.assert_allclose(theirs(tmp_path / "saved"), expected, atol=1e-5)
    assert load_model(tmp_path / "saved").config.lora is None


@pytest.mark.parametrize("length", [12, 20, LENGTH])
def test_the_longer_text_of_a_pair_is_cut_as_transformers_cuts_it(length, tmp_path):
    folder = save_scorer(tmp_path / "published")
    model = load_model(folder, dtype="float32")
    pretrained = transformers.AutoTokenizer.from_pretrained(folder)
    found = model.tokenizer.of_pairs(PAIRS, length)
    for tokens, (query, document) in zip(found, PAIRS, strict=True):
        expected = pretrained(query, document, truncation=True, max_length=length)
        whole = pretrained(query, document)
        assert tokens["input_ids"].tolist() == expected["input_ids"]
        assert tokens["token_type_ids"].tolist() == expected["token_type_ids"]
        lost = len(whole["input_ids"]) - len(expected["input_ids"])
        assert bool(tokens["cut"][0]) == bool(lost)
    assert cut_share(model.tokenizer.of_pairs(PAIRS)) == 2 / 5
    # The document is cut, not the query, unless it is the longer one.
    head = pretrained(QUERY, add_special_tokens=False)["input_ids"]
    kept = model.tokenizer.of_pairs([PAIRS[3]], LENGTH)[0]["input_ids"].tolist()
    assert kept[1 : 1 + len(head)] == head


def test_a_text_is_not_embedded(tmp_path):
    model = load_model(save_scorer(tmp_path / "published"), dtype="float32")
    with pytest.raises(DataError, match="is a cross-encoder"):
        encode(model, ["Paris"], role="query")
    model.save(tmp_path / "saved")
    for folder in (tmp_path / "published", tmp_path / "saved"):
        with pytest.raises(ArtifactError, match="gives no vectors, so it is no embedding model"):
            check_loadable(folder)


def test_weights_that_give_no_score_are_not_saved(tmp_path):
    folder = save_scorer(tmp_path / "published")
    model = build_model(config(folder), folder, seed=0)
    with torch.no_grad():
        model.backbone.classifier.weight.fill_(3e38)
        model.backbone.classifier.bias.fill_(3e38)
    with pytest.raises(ArtifactError, match="score of a short pair"):
        model.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
