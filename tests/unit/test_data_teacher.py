"""The teacher of mining, from a folder of sentence-transformers."""

import json
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from own_pairs import own_run, write_pairs
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder as SentenceCrossEncoder
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_models import LINES, save_cross_encoder, save_decoder, save_encoder

from rayembed.config.backbone import BackboneConfig, MeanPooling
from rayembed.config.data_run import data_of
from rayembed.config.mining import MiningConfig
from rayembed.config.settings import parse
from rayembed.data.mining import rescoring
from rayembed.data.prepare import prepare
from rayembed.data.vectors import teacher
from rayembed.data.vectors.teacher import load_teacher, weights_of
from rayembed.errors import ArtifactError
from rayembed.models.contract import EmbeddingModel
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_as_saved, load_model
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode
from rayembed.pipeline.run.runtime import Here


def test_models_of_preparation_are_gone_when_a_run_is_prepared(tmp_path, monkeypatch):
    """On a GPU they would take the memory that training measures next."""
    made, held = [], []

    def noted(model):
        made.append(weakref.ref(model))
        return model.train(False)

    def counted(module):
        held.append(module._load.cache_info().currsize)

    for kind in (EmbeddingModel, SentenceCrossEncoder):
        monkeypatch.setattr(kind, "eval", noted)
    for module, name in ((teacher, "release_teacher"), (rescoring, "release_cross_encoder")):
        release = getattr(module, name)
        both = lambda module=module, release=release: (counted(module), release())  # noqa: E731
        monkeypatch.setattr(module, name, both)
    reranker = save_cross_encoder(tmp_path / "reranker")
    mining = {"teacher": str(save_encoder(tmp_path / "encoder"))}
    mining |= {"num_negatives": 1, "rule": {"kind": "top_k"}, "rescoring": {"model": str(reranker)}}
    write_pairs(tmp_path / "pairs.jsonl", 24)
    run = own_run(
        tmp_path,
        f"data.datasets.pairs.mining={json.dumps(mining)}",
        "data.datasets.pairs.held_out=null",
        "stages.finetune.batch.num_negatives=1",
    )
    prepared = prepare(run, Here().data_context(data_of(run)))
    assert list(prepared) == ["finetune"]
    assert held == [1, 1], "both were loaded"
    assert [module._load.cache_info().currsize for module in (teacher, rescoring)] == [0, 0]
    assert len(made) >= 2
    assert not any(model() is not None for model in made)


TEXTS = ["where do cats live", "Paris is the capital of France"]


def test_prefixes_of_the_settings_replace_those_of_the_folder(tmp_path):
    encoder = save_encoder(tmp_path / "encoder")
    model = SentenceTransformer(
        modules=[Transformer(str(encoder)), Pooling(32, "mean")],
        device="cpu",
        prompts={"query": "the fox: ", "document": ""},
    )
    model.save(str(tmp_path / "teacher"))

    def vectors(**settings):
        config = parse(MiningConfig, {"teacher": str(tmp_path / "teacher"), **settings})
        encode = load_teacher(config, weights_of(config.teacher))
        return encode(TEXTS, "query"), encode(TEXTS, "document")

    def expected(prefix):
        return model.encode([prefix + text for text in TEXTS], normalize_embeddings=True, prompt="")

    for settings, queries in (({}, "the fox: "), ({"query_prefix": "the dog: "}, "the dog: ")):
        found = vectors(**settings)
        assert (found[0] * expected(queries)).sum(1).min() > 0.999
        assert (found[1] * expected("")).sum(1).min() > 0.999
    assert (expected("the fox: ") * expected("the dog: ")).sum(1).max() < 0.999
    assert (expected("the fox: ") * expected("")).sum(1).max() < 0.999


@pytest.mark.parametrize("save", [save_encoder, save_decoder], ids=["encoder", "decoder"])
def test_more_precise_than_bfloat16_throughout(tmp_path, save):
    texts = [" ".join(LINES[i % 5].split()[: 1 + i % 7]) for i in range(2, 60)]
    reference = str(save(tmp_path / "model"))
    config = parse(MiningConfig, {"teacher": reference, "dtype": "bfloat16"})
    found = load_teacher(config, weights_of(reference))(texts, "document")
    exact = encode(load_model(Path(reference), dtype="float32"), texts, role="document")
    rounded = encode(load_model(Path(reference), dtype="bfloat16"), texts, role="document")
    apart = [np.abs(vectors @ vectors.T - exact @ exact.T).mean() for vectors in (found, rounded)]
    assert 0 < apart[0] < apart[1], "not in bfloat16 at all, or throughout"


@pytest.mark.parametrize("save", [save_encoder, save_decoder], ids=["encoder", "decoder"])
def test_weights_in_float16_take_half_the_memory_and_end_as_they_do_by_float32(
    tmp_path, save, monkeypatch
):
    folder = save(tmp_path / "model")
    file = folder / "model.safetensors"
    half = {k: v.half() if v.is_floating_point() else v for k, v in load_file(file).items()}
    save_file(half, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "float16"}))
    config = parse(MiningConfig, {"teacher": str(folder), "dtype": "bfloat16"})
    loaded, sizes = [], []

    def watched(load):
        def watching(path, **settings):
            loaded.append(load(path, **settings))
            sizes.append(sum(p.nbytes for p in loaded[-1].parameters()))
            return loaded[-1]

        return watching

    def vectors():
        teacher._load.cache_clear()
        return load_teacher(config, weights_of(config.teacher))(TEXTS, "document")

    monkeypatch.setattr(teacher, "load_as_saved", watched(load_as_saved))
    found = vectors()
    by_float32 = watched(partial(load_model, dtype="float32"))
    monkeypatch.setattr(teacher, "load_as_saved", by_float32)
    expected = vectors()

    assert 2 * sizes[0] == sizes[1]
    np.testing.assert_array_equal(found, expected)
    for one, other in zip(*(model.named_parameters() for model in loaded), strict=True):
        assert one[0] == other[0]
        assert one[1].dtype == other[1].dtype
        assert one[1].dtype in (torch.bfloat16, torch.float32)
        assert torch.equal(one[1], other[1])


def test_other_weights_under_the_same_name_are_loaded_anew(tmp_path):
    """A process of Ray outlives a job, and a teacher that is trained on is saved where it was."""
    reference = str(save_encoder(tmp_path / "teacher"))
    config = parse(MiningConfig, {"teacher": reference})
    first = weights_of(reference)
    before = load_teacher(config, first)(TEXTS, "document")
    assert load_teacher(config, first) is load_teacher(config, first), "loaded once"
    file = tmp_path / "teacher" / "model.safetensors"
    saved = load_file(file)
    save_file({name: torch.flip(value, [0]) for name, value in saved.items()}, file)
    second = weights_of(reference)
    assert second != first
    after = load_teacher(config, second)(TEXTS, "document")
    assert np.abs(before - after).max() > 0.01
    # A machine that has others than the job began with gives no vectors under a wrong name.
    with pytest.raises(ArtifactError, match=f"has weights {second}.* began with {first}"):
        load_teacher(config, first)


def test_a_prefix_that_the_teachers_template_makes_is_its_instruction(tmp_path):
    """Its tokens stay out of an NV-Embed's pool, which as a part of the text they would not."""
    decoder = save_decoder(tmp_path / "decoder", "mistral")
    backbone = BackboneConfig(path="unused", dtype="float32")
    settings = NVEmbedConfig(backbone=backbone, pooling=MeanPooling())
    model = build_model(settings, decoder, seed=0).eval()
    model.save(tmp_path / "teacher")
    reference = str(tmp_path / "teacher")

    def found(**prefixes):
        config = parse(MiningConfig, {"teacher": reference, **prefixes})
        teach = load_teacher(config, weights_of(reference))
        return teach(TEXTS, "query"), teach(TEXTS, "document")

    queries, documents = found(query_prefix="Instruct: find the fox\nQuery: ")
    told = encode(model, TEXTS, role="query", instruction="find the fox")
    prefixed = [f"Instruct: find the fox\nQuery: {text}" for text in TEXTS]
    as_text = encode(model, prefixed, role="query")
    assert (queries * told).sum(1).min() > 0.999
    assert (queries * as_text).sum(1).max() < 0.999
    assert (documents * encode(model, TEXTS, role="document")).sum(1).min() > 0.999
    other, _ = found(query_prefix="search_query: ")
    as_text = encode(model, [f"search_query: {text}" for text in TEXTS], role="query")
    assert (other * as_text).sum(1).min() > 0.999
