"""Training goes on from models that have more than a transformer."""

import json
import logging

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_models import save_decoder, save_encoder

from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.start import find_start
from rayembed.models.nvembed.config import NVEmbedConfig

DENSE = {"width": 8, "bias": True, "activation": "tanh"}


def nvembed(**pooling):
    return parse(
        NVEmbedConfig,
        {
            "backbone": {"path": "given", "dtype": "float32"},
            "pooling": pooling or {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
            "lora": {"rank": 2, "alpha": 4, "dropout": 0.0},
            "query_max_length": 32,
            "document_max_length": 32,
        },
    )


def biencoder(**values):
    return parse(
        BiEncoderConfig,
        {
            "backbone": {"path": "given", "dtype": "float32"},
            "query_max_length": 32,
            "document_max_length": 32,
            **values,
        },
    )


def same(left, right):
    return all(torch.equal(v, right.state_dict()[n]) for n, v in left.state_dict().items())


def test_the_pooling_of_an_nv_embed_is_trained_on(tmp_path, caplog):
    first = build_model(nvembed(), save_decoder(tmp_path / "decoder"), seed=1)
    first.save(tmp_path / "model")
    check_buildable(nvembed(), tmp_path / "model")
    again = build_model(nvembed(), tmp_path / "model", seed=2)
    assert same(first.pooling, again.pooling)
    assert not caplog.records
    # The control: another seed alone gives another pooling, and another kind is told.
    assert not same(first.pooling, build_model(nvembed(), tmp_path / "decoder", seed=2).pooling)
    with caplog.at_level(logging.WARNING):
        build_model(nvembed(kind="mean"), tmp_path / "model", seed=2)
    assert "head is initialised randomly" in caplog.text
    assert "token_layout" not in caplog.text
    with caplog.at_level(logging.WARNING):
        released = nvembed().model_copy(update={"token_layout": "released"})
        find_start(tmp_path / "model", released)
    assert "as model.token_layout=paper, this run as released" in caplog.text


@pytest.mark.parametrize("kind", ["causal2vec", "cde"])
def test_a_head_is_trained_on_beside_its_own_encoder_alone(tmp_path, caplog, kind):
    encoder = save_encoder(tmp_path / "encoder")
    main = save_decoder(tmp_path / "llm") if kind == "causal2vec" else encoder
    values = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "lora": None,
        "query_max_length": 32,
        "document_max_length": 32,
    }
    config = parse(Causal2VecConfig if kind == "causal2vec" else CDEConfig, values)
    saved = build_model(config, {"backbone": main, "encoder": encoder}, seed=1)
    saved.save(tmp_path / "model")
    both = {"backbone": tmp_path / "model", "encoder": tmp_path / "model"}
    assert same(build_model(config, both, seed=2).head, saved.head)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        other = build_model(config, both | {"encoder": encoder}, seed=2)
    assert "with its own encoder" in caplog.text
    assert not same(other.head, saved.head)
    assert same(other.backbone, saved.backbone)


def test_dense_modules_are_trained_on(tmp_path):
    encoder = save_encoder(tmp_path / "encoder")
    modules = [Transformer(str(encoder)), Pooling(32, "mean"), Dense(32, 8)]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "theirs"))
    config = biencoder(projections=[DENSE])
    model = build_model(config, tmp_path / "theirs", seed=1)
    assert torch.equal(model.pooling.projections[0].linear.weight, modules[2].linear.weight)
    model.save(tmp_path / "ours")
    assert same(model.pooling, build_model(config, tmp_path / "ours", seed=2).pooling)
    for function in (check_buildable, lambda *given: build_model(*given, seed=1)):
        with pytest.raises(
            ConfigError, match=r"has Dense modules .* set model.projections=\[{'wid"
        ):
            function(biencoder(), tmp_path / "theirs")


def test_another_pooling_than_the_start_model_is_told(tmp_path, caplog):
    encoder = save_encoder(tmp_path / "encoder")
    modules = [Transformer(str(encoder)), Pooling(32, "cls")]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "theirs"))
    build_model(biencoder(pooling={"kind": "cls"}), tmp_path / "theirs", seed=1)
    assert not caplog.records
    build_model(biencoder(), tmp_path / "theirs", seed=1)
    assert "pools by cls, this run by mean" in caplog.text


def test_a_transformer_in_a_folder_of_its_own_is_found(tmp_path):
    save_encoder(tmp_path / "theirs" / "0_Transformer")
    (tmp_path / "theirs" / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode": "mean"}
    (tmp_path / "theirs" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = ("Transformer", "Pooling")
    described = [
        {"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (tmp_path / "theirs" / "modules.json").write_text(json.dumps(described))
    model = build_model(biencoder(), tmp_path / "theirs", seed=1)
    assert model.dimensions == (32,)
