"""A contextual model gets a corpus by a job: documents drawn, or one of each cluster."""

import json
import sys

import numpy as np
import pytest
import torch
from tiny_models import save_cde_stages, save_encoder

from rayembed.config.settings import parse
from rayembed.config.types import SHORT_NAMES
from rayembed.errors import ConfigError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model, saved_dtype
from rayembed.models.loading.saved_prompts import saved_instructions
from rayembed.models.passes.encoding import corpus_context, encode_context
from rayembed.proof.proof import read_proof
from rayembed_extras.corpora.clusters import cluster_representatives, clustered_context
from rayembed_extras.corpora.job import run_corpus_job, save_with_corpus

CORPUS = ["dogs live in ancient places", "paris is the capital", "7 foxes", "the world of cats", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": 3,
        "num_soft_prompts": 2,
        "output": "residual",
        "query_max_length": 32,
        "document_max_length": 32,
    }
    stages = save_cde_stages(tmp_path_factory.mktemp("stages"))
    return build_model(parse(CDEConfig, config), stages, seed=5).eval()


def test_one_document_of_each_cluster_is_nearest_to_its_centre():
    rng = np.random.default_rng(0)
    centres = np.eye(8)[:4]
    rows = np.concatenate([c + 0.05 * rng.normal(size=(25, 8)) for c in centres])
    chosen = cluster_representatives(rows, 4, seed=0)
    assert sorted(row // 25 for row in chosen) == [0, 1, 2, 3]
    for row in chosen:
        own = rows[row // 25 * 25 : row // 25 * 25 + 25]
        unit = own / np.linalg.norm(own, axis=1, keepdims=True)
        mean = unit.mean(0)
        assert (unit @ mean).argmax() == row % 25
    assert cluster_representatives(rows[:3], 4, seed=0) == [0, 1, 2]


@pytest.mark.parametrize("pick", ["random", "clusters"])
def test_the_job_gives_a_model_its_corpus(model, tmp_path, capsys, pick):
    model.save(tmp_path / "plain")
    documents = tmp_path / "corpus.jsonl"
    documents.write_text("".join(json.dumps({"body": text}) + "\n" for text in CORPUS))
    asked = ["--model", str(tmp_path / "plain"), "--documents", str(documents)]
    asked += ["--output", str(tmp_path / "with"), "--pick", pick]
    assert run_corpus_job([*asked, "--column", "body"], about=None) == 0
    own = load_model(tmp_path / "with")
    assert f"corpus of {len(own.corpus)} context documents" in capsys.readouterr().out
    choose = corpus_context if pick == "random" else clustered_context
    assert torch.equal(own.corpus, choose(model, CORPUS, seed=0))
    assert run_corpus_job(asked, about=None) == 2
    assert "--column" in capsys.readouterr().err


def test_the_job_keeps_what_the_folder_says_of_tasks(model, tmp_path):
    told = {"SciFact": "scientific claim: ", "Topics": "clustering: "}
    model.save(tmp_path / "plain", instructions=told)
    save_with_corpus(str(tmp_path / "plain"), CORPUS, tmp_path / "with", pick="random", seed=0)
    kept = [
        json.loads((tmp_path / name / "config_sentence_transformers.json").read_text())
        for name in ("plain", "with")
    ]
    assert kept[0] == kept[1]
    assert kept[1]["prompts"]["Topics"] == "clustering: "
    assert saved_instructions(tmp_path / "with", model.config) == told


def test_what_the_job_cannot_do_is_told_before_a_model_is_loaded(
    model, tmp_path, monkeypatch, capsys
):
    def load_model(folder):
        raise AssertionError("work began")

    save_encoder(tmp_path / "encoder")
    model.save(tmp_path / "plain")
    monkeypatch.setattr("rayembed.models.loading.load.load_model", load_model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')

    def error(**changes):
        asked = {
            "model": tmp_path / "plain",
            "documents": tmp_path / "texts.jsonl",
            "output": tmp_path / "with",
        } | changes
        arguments = [part for name, value in asked.items() for part in (f"--{name}", str(value))]
        assert run_corpus_job(arguments, about=None) > 0
        return capsys.readouterr().err

    assert "it contains files that are not a model" in error(output=tmp_path / "full")
    assert "'biencoder', which has no corpus context" in error(model=tmp_path / "encoder")
    assert "neither config.json nor modules.json" in error(model=tmp_path / "empty")
    assert "nothing" in error(documents=tmp_path / "nothing.jsonl")


def test_clusters_without_faiss_are_refused_before_documents_are_embedded(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(model, "embed_context", None)
    with pytest.raises(ConfigError, match="FAISS"):
        clustered_context(model, CORPUS, seed=0)


def test_one_document_of_each_cluster_is_the_context(model):
    every = encode_context(model, CORPUS[:4])
    context = clustered_context(model, CORPUS, seed=0)
    assert context.shape[1] == 32
    assert 1 <= len(context) <= 3
    assert torch.cdist(context, every).min(dim=1).values.max() < 1e-5
    assert clustered_context(model, [], seed=0) is None


def test_a_short_name_stands_for_its_model():
    (short, whole), *_ = SHORT_NAMES.items()
    asked = ["--model", short, "--documents", "x", "--output", "x"]
    assert run_corpus_job.arguments(asked).model == whole


@pytest.mark.parametrize("pick", ["random", "clusters"])
def test_weights_are_saved_as_they_were(tmp_path, pick):
    config = {
        "backbone": {"path": "given", "dtype": "bfloat16"},
        "encoder": {"path": "given"},
        "num_context": 3,
        "num_soft_prompts": 2,
    }
    stages = save_cde_stages(tmp_path / "stages")
    build_model(parse(CDEConfig, config), stages, seed=5).save(tmp_path / "model")
    save_with_corpus(str(tmp_path / "model"), CORPUS, tmp_path / "with", pick=pick, seed=0)
    assert saved_dtype(tmp_path / "with") == "bfloat16"
    folders = tmp_path / "model", tmp_path / "with"
    before, after = (load_model(one, dtype="bfloat16").state_dict() for one in folders)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    proof = read_proof(tmp_path / "with")
    assert "no_corpus" in {mistake.name for mistake in proof.mistakes}
