"""Folders and objects of this process against a model's proof."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from proved_models import save_proved
from registered import register
from sentence_transformers import SentenceTransformer
from tiny_folders import save_nvembed

from rayembed.api.embedder import load
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.proof.proof import PROOF_FOLDER, read_proof
from rayembed.proof.write import write_proof
from rayembed.registry.tracking import Tracker
from rayembed_extras.verification import verify
from rayembed_extras.verification.job import DIFFERS, run_verify_job
from rayembed_extras.verification.targets import _is_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_proved(tmp_path_factory.mktemp("mean") / "model", "mean")


@pytest.fixture(scope="module")
def changed(folder, tmp_path_factory):
    """The folder with another pooling, as a converter may leave it, without its proof."""
    copy = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(folder, copy)
    path = copy / "1_Pooling" / "config.json"
    modes = json.loads(path.read_text())
    modes |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    path.write_text(json.dumps(modes))
    shutil.rmtree(copy / PROOF_FOLDER)
    return copy


def test_a_folder_has_the_vectors_of_its_own_proof(folder, capsys):
    assert run_verify_job([str(folder), "--repeat", "1"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("same vectors (cosine ≥ 0.9999")
    assert "sentence-transformers puts the folder's own" in told.err
    literal = verify(folder, prompts="client", repeat=1)
    assert literal.same
    assert "as literal text" in literal.notes[0]


def test_a_changed_folder_is_told_by_the_proof_of_the_right_one(folder, changed, capsys):
    code = run_verify_job([str(changed), "--proof", str(folder), "--repeat", "1"])
    told = capsys.readouterr().out
    assert code == DIFFERS
    assert told.startswith("CLS pooling where the model has mean pooling; cosine ")
    assert "sentence-transformers: copy 1_Pooling/config.json" in told
    assert run_verify_job([str(changed)]) == 2
    assert "has no proof (reference vectors) of its own" in capsys.readouterr().err
    shutil.copytree(folder / PROOF_FOLDER, changed / PROOF_FOLDER)
    with pytest.raises(ArtifactError, match="settings were changed"):
        verify(changed)
    shutil.rmtree(changed / PROOF_FOLDER)


def test_a_model_without_a_proof_gets_one_in_memory(folder, changed, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    shutil.rmtree(bare / PROOF_FOLDER)
    made = verify(folder, bare, repeat=1)
    assert made.same, made.line
    assert not (bare / PROOF_FOLDER).exists()
    assert not verify(changed, bare, repeat=1).same, "the control"


def test_a_proof_of_an_earlier_format_is_made_again_in_memory(folder, tmp_path, capsys):
    older = shutil.copytree(folder, tmp_path / "older")
    path = older / PROOF_FOLDER / "proof.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    assert verify(folder, older, repeat=1).same
    assert json.loads(path.read_text())["format"] == 1
    assert run_verify_job([str(older)]) == 2
    assert "has no proof (reference vectors) of its own" in capsys.readouterr().err


def test_a_registered_version_is_target_and_proof(folder, changed, tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker.open(
        uri, "tests", "run", "f" * 12, {}, {}, folder=tmp_path / "run", total_steps=1
    )
    given = {"weights_fingerprint": weights_fingerprint(folder), "dimensions": (24,)}
    given |= {"instruction_template": None, "global_step": 1}
    made = register(folder, "proved", tracker=tracker, **given)
    at = ["--tracking-uri", uri, "--repeat", "1"]
    assert run_verify_job([made.alias_uri, *at]) == 0
    assert run_verify_job([str(folder), "--proof", made.uri, *at]) == 0
    assert run_verify_job([str(changed), "--proof", made.alias_uri, *at]) == DIFFERS


def test_a_folder_in_rayembeds_own_format(tmp_path):
    folder = save_nvembed(tmp_path / "model")
    write_proof(folder)
    verdict = verify(folder, repeat=1)
    assert verdict.same, verdict.line
    assert verify(load(folder, device="cpu"), folder, repeat=1).same


class LangChain:
    """The two methods of LangChain's `Embeddings`."""

    def __init__(self, model, prompts):
        self.model, self.prompts = model, prompts

    def embed_query(self, text):
        return self.embed(self.prompts["query"], [text])[0]

    def embed_documents(self, texts):
        return self.embed(self.prompts["document"], texts)

    def embed(self, prompt, texts):
        return self.model.encode([prompt + text for text in texts]).tolist()


def test_objects(folder):
    model = SentenceTransformer(str(folder), device="cpu")
    proof = read_proof(folder)
    right = LangChain(model, {"query": "where ", "document": "the world "})
    bare = LangChain(model, {"query": "", "document": ""})
    for embedder in (model, right, lambda texts: model.encode(texts, convert_to_tensor=True)):
        verdict = verify(embedder, proof, repeat=1)
        assert verdict.same, (embedder, verdict.line)
    verdict = verify(bare, proof, repeat=1)
    assert verdict.mistakes == ("no_prompt",)
    assert "as a vector store calls them" in verdict.notes[0]
    assert verify(bare, proof, prompts="client", repeat=1).same
    swapped = LangChain(model, {"query": "the world ", "document": "where "})
    assert verify(swapped, proof, repeat=1).mistakes == ("wrong_role",)


@pytest.mark.parametrize(
    ("target", "options", "error", "words"),
    [
        (7, {}, ConfigError, "cannot verify a int"),
        (
            "folder",
            {"schema": "tei"},
            ConfigError,
            "schema applies only to the address of a server",
        ),
        ("folder", {"prompts": "both"}, ConfigError, "allowed: 'client', 'server'"),
        ("folder", {"repeat": 0}, ConfigError, "1 or more"),
        (lambda texts: np.ones((1, 24)), {}, ArtifactError, "gives 1 vectors for"),
        (lambda texts: None, {}, ArtifactError, "instead of vectors"),
        (np.ones, {"prompts": "server"}, ConfigError, "a function is given texts alone"),
    ],
)
def test_what_cannot_be_verified_says_why(target, options, error, words, folder):
    target = folder if target == "folder" else target
    with pytest.raises(error, match=words):
        verify(target, folder, **options)


def test_a_gguf_file_needs_llama_cpp(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        verify(file, folder)


class Llama:
    """The interface of llama-cpp-python that is used, around a SentenceTransformer."""

    model = None

    def __init__(self, *, model_path, embedding, verbose, n_ctx, n_batch, n_ubatch):
        assert embedding
        assert n_ctx == n_batch == n_ubatch == 320

    def embed(self, texts, *, normalize, truncate):
        assert normalize
        assert not truncate
        if any(len(self.model.tokenizer(text)["input_ids"]) > 320 for text in texts):
            raise ValueError("Requested tokens (321) exceed batch size of 320")
        return self.model.encode(texts).tolist()


@pytest.mark.parametrize("place", ["models", "a@b.com"])
def test_a_gguf_file_by_llama_cpp(place, folder, changed, tmp_path, monkeypatch):
    import types

    fake = types.ModuleType("llama_cpp")
    fake.Llama = Llama
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", fake)
    (tmp_path / place).mkdir()
    file = tmp_path / place / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(Llama, "model", SentenceTransformer(str(folder), device="cpu"))
    verdict = verify(file, folder, repeat=1)
    assert verdict.same
    assert "beyond the length limit are refused" in verdict.notes[-1]
    monkeypatch.setattr(Llama, "model", SentenceTransformer(str(changed), device="cpu"))
    verdict = verify(file, folder, repeat=1)
    assert verdict.mistakes == ("cls_pooling",)
    assert "llama.cpp: start it with --pooling mean" in verdict.advice[1]


@pytest.mark.parametrize(
    ("target", "endings", "is_file"),
    [
        ("/home/a@b.com/model.gguf", (".gguf",), True),
        ("/home/a@b.com/model.ONNX", (), True),
        ("model.gguf@copy", (), False),
        ("hf://org/name@main/model.gguf", (), True),
        ("hf://org/name/model.gguf@main", (".gguf",), True),
        ("hf://org/name@main", (), False),
        ("models:/m@champion", (), False),
    ],
)
def test_a_file_is_known_by_its_ending(target, endings, is_file):
    assert _is_file(target, *endings) == is_file


def test_the_python_of_the_page_runs(folder, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    place = tmp_path / "outputs" / "runs" / "support" / "models" / "finetune"
    shutil.copytree(folder, place)
    monkeypatch.chdir(tmp_path)
    exec(block, {"embeddings": SentenceTransformer(str(folder), device="cpu")})


@pytest.mark.parametrize(
    ("target", "named", "sent"),
    [
        ("http://127.0.0.1:9", None, "own"),
        ("http://localhost:9/v1", None, "own"),
        ("https://embeddings.example", None, None),
        ("https://127.0.0.1.example", None, None),
        ("https://embeddings.example", "THEIRS", "theirs"),
        ("models:/m@champion", None, None),
    ],
)
def test_the_token_of_ones_own_server_stays_on_this_machine(target, named, sent, monkeypatch):
    monkeypatch.setenv("RAYEMBED_API_KEY", "own")
    monkeypatch.setenv("THEIRS", "theirs")
    given = []

    def verify_target(*_, **options):
        given.append(options.get("key"))
        raise ArtifactError("enough")

    monkeypatch.setattr("rayembed_extras.verification.targets.verify_target", verify_target)
    words = [] if named is None else ["--api-key-env", named]
    assert run_verify_job([target, "--proof", "m", *words]) == 1
    assert given == [sent]


def test_other_versions_of_packages_are_named_where_the_vectors_differ(folder, changed):
    proof = read_proof(folder)
    older = replace(proof, made_by={**proof.made_by, "torch": "1.0"})
    assert not any("torch 1.0" in note for note in verify(folder, older, repeat=1).notes)
    for right, named in ((older, True), (proof, False)):
        notes = verify(changed, right, repeat=1).notes
        assert any("computed with torch 1.0 (here" in note for note in notes) == named


@pytest.mark.parametrize("mistake", ["", "pooling", "prompt", "width"])
def test_vectors_cut_to_fewer_numbers(folder, changed, mistake):
    """Of a Matryoshka server, which cuts and normalises."""
    model = SentenceTransformer(str(changed if mistake == "pooling" else folder), device="cpu")
    width = 8 if mistake == "width" else 16

    def embed(texts):
        if mistake == "prompt":
            texts = [text.removeprefix("where ").removeprefix("the world ") for text in texts]
        vectors = model.encode(texts)[:, :width]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    verdict = verify(embed, folder, dimensions=16, repeat=1)
    named = {"pooling": "cls_pooling", "prompt": "no_prompt", "width": "cut_to_8"}
    assert verdict.mistakes == ((named[mistake],) if mistake else ()), verdict.line
    assert verdict.same == (not mistake)
    assert "trained for vectors of (24,) numbers, none of them 16" in verdict.notes[-1]
    raw = verify(lambda texts: model.encode(texts)[:, :16], folder, dimensions=16, repeat=1)
    assert "no_normalisation" in raw.mistakes


@pytest.mark.parametrize("also", ["", "pooling", "head"])
def test_vectors_that_are_not_cut(also, folder, changed, tmp_path):
    target = changed if also == "pooling" else folder
    if also == "head":
        target = shutil.copytree(folder, tmp_path / "model")
        path = target / "modules.json"
        modules = [one for one in json.loads(path.read_text()) if "Dense" not in one["type"]]
        path.write_text(json.dumps(modules))
        (target / "rayembed.json").unlink()
    verdict = verify(target, folder, dimensions=16, repeat=1)
    assert not verdict.same
    named = {"pooling": "cls_pooling", "head": "no_dense"}
    assert verdict.mistakes == ("not_cut", *([named[also]] if also else [])), verdict.line
    if also == "head":
        assert verdict.line.startswith("vectors of 32 numbers where 16 are right: the target did")
    else:
        said = "all 24 numbers of the vectors: the target did not cut them to 16; "
        said += "also: CLS pooling" if also else "cut, they are the same vectors"
        assert verdict.line.startswith(said)
    assert verdict.figures["dimensions"] == (32 if also == "head" else 24)
    assert "sentence-transformers: load it with truncate_dim=16" in verdict.advice[1]


@pytest.mark.parametrize("cut", [None, 200, 24])
def test_one_limit_for_two_roles_is_named(cut, folder, tmp_path):
    """Of a server that reads texts of both roles to the longer limit."""
    two = shutil.copytree(folder, tmp_path / "model")
    path = two / "rayembed.json"
    settings = json.loads(path.read_text())
    settings["model"]["query_max_length"] = 24
    path.write_text(json.dumps(settings))
    write_proof(two)
    assert verify(two, repeat=1).same
    served = SentenceTransformer(str(two), device="cpu")
    if cut is not None:
        served.max_seq_length = cut
    verdict = verify(served, two, within="float32", repeat=1)
    if cut is None:
        assert verdict.mistakes == ("one_limit",), verdict.line
        assert "the model reads 24 tokens of queries and 320 of documents" in verdict.line
        assert verdict.advice[0].startswith("cut queries to 24 tokens before they are sent")
        assert "sentence-transformers: set model[0].query_length" in verdict.advice[1]
    else:
        assert not verdict.same
        assert "one_limit" not in verdict.mistakes


def test_more_numbers_than_the_model_has_are_refused(folder):
    with pytest.raises(ConfigError, match=r"dimensions = 25 .* give 1 to 24"):
        verify(folder, dimensions=25)


def test_a_limit_that_no_text_reaches_is_said(folder):
    proof = read_proof(folder)
    assert not any("is not noticed" in note for note in verify(folder, proof, repeat=1).notes)
    kept = [i for i, text in enumerate(proof.texts) if (text.tokens or 0) <= 300]
    short = replace(
        proof, texts=tuple(proof.texts[i] for i in kept), vectors=proof.vectors[kept], mistakes=()
    )
    verdict = verify(folder, short, repeat=1)
    assert verdict.same
    assert "a server that cuts longer texts than 300 is not noticed" in verdict.notes[-1]
