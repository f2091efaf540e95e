"""The proof of a model folder: its texts and vectors, and what reading refuses."""

import io
import json
import re
import shutil
from dataclasses import replace

import architecture_contract as contract
import numpy as np
import pytest
import torch
from proved_models import save_proved
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tiny_folders import KINDS, save_tiny, tiny_parts, tiny_settings

from rayembed.errors import ArtifactError
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import count_parameters, weights_fingerprint
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.models.sentence_module import as_sentence_transformer
from rayembed.proof.check import changed_packages, check, tolerated
from rayembed.proof.proof import Mistake, ProofText, read_proof
from rayembed.proof.texts import FOR_MISTAKES, proof_texts
from rayembed.proof.write import TOLERANCE, tolerances, write_proof
from rayembed.registry.card_parts import FOLDER, proof_section
from rayembed.training.checkpoints.export import upload_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models with proofs, by kind."""
    home = tmp_path_factory.mktemp("proofs")
    for kind in KINDS:
        parts = tiny_parts(kind, home / f"{kind}-parts")
        model = contract.moved(build_model(tiny_settings(kind), parts, seed=1))
        contract.of_corpus(model).save(home / kind, instructions={"Questions": "Find answers"})
        write_proof(home / kind)
    return home


def by_rayembed(folder):
    model = load_model(folder)

    def embed(texts):
        return np.stack(
            [encode(model, x.text, role=x.role, instruction=x.instruction) for x in texts]
        )

    return embed


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_gives_the_right_vectors_however_it_is_loaded(kind, folders):
    folder = folders / kind
    proof = read_proof(folder)
    assert check(proof, by_rayembed(folder)).same
    loaded = as_sentence_transformer(folder, device="cpu")

    def embed(texts):
        encoders = {"query": loaded.encode_query, "document": loaded.encode_document}
        return np.stack([encoders[x.role](x.text, prompt=x.prompt) for x in texts])

    assert check(proof, embed).same
    assert proof.dtype == "float32"
    assert len(proof.texts) <= 64


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_every_role_and_instruction(kind, folders):
    proof = read_proof(folders / kind)
    about = {text.about for text in proof.texts}
    for role in ("query", "document"):
        of_role = {text.about for text in proof.texts if text.role == role}
        assert of_role >= {"CJK", "combining marks (NFD)", "digits after the prompt", "near-empty"}
    assert "instruction Questions: digits after the prompt" in about
    told = [text for text in proof.texts if (text.instruction or "").strip() == "Find answers"]
    assert told
    assert all("Find answers" in text.prompt for text in told)


def test_all_instructions_have_texts_and_64_are_not_exceeded(folders):
    model = load_model(folders / "nvembed")
    more = [ProofText("one more", "query", "")] * 20
    instructions = {f"n{i}": f"Find {i}" for i in range(20)}
    texts, left_out = proof_texts(model, instructions, [lambda _: (more, ["none"])])
    assert len(texts) <= 64
    assert texts[-20:] == more
    assert left_out == ["none"]
    assert len({text.instruction for text in texts} - {None}) == 8


def test_a_large_model_has_few_texts_of_all_kinds(folders, monkeypatch):
    model = load_model(folders / "biencoder")
    whole, _ = proof_texts(model, {})
    monkeypatch.setattr("rayembed.proof.texts.num_parameters", lambda _: 7 * 10**9)
    few, (why,) = proof_texts(model, {})
    assert "7.0 billion parameters" in why
    assert len(few) < 0.7 * len(whole)
    assert {text.about for text in few} == {text.about for text in whole}
    roles = {name: {t.role for t in few if t.about == name} for name in FOR_MISTAKES}
    assert all(len(found) == 2 for found in roles.values())
    assert len({text.role for text in few if text.about not in FOR_MISTAKES}) == 2


def test_a_model_too_large_for_float32_is_proved_as_it_is_saved(tmp_path, monkeypatch):
    folder = save_tiny("biencoder", tmp_path / "model", backbone={"path": "p", "dtype": "bfloat16"})
    assert write_proof(folder).dtype == "float32"
    shutil.rmtree(folder / "proof")
    monkeypatch.setattr("rayembed.proof.write.free_memory", lambda device: 1000)
    proof = write_proof(folder)
    assert proof.dtype == "bfloat16"
    assert proof.tolerance["bfloat16"] == TOLERANCE["bfloat16"]
    assert check(proof, by_rayembed(folder)).same


def test_other_vectors_are_not_the_same(folders):
    proof = read_proof(folders / "biencoder")
    vectors = proof.vectors.copy()
    assert check(proof, lambda texts: vectors).same
    assert check(proof, lambda texts: 2 * vectors).wrong == tuple(range(len(vectors)))
    vectors[3] = vectors[4]
    assert check(proof, lambda texts: vectors).wrong == (3,)
    vectors[3] = np.nan
    assert check(proof, lambda texts: vectors).wrong == (3,)
    assert not check(proof, lambda texts: proof.vectors[:, :8]).same
    with pytest.raises(ValueError, match="texts"):
        check(proof, lambda texts: proof.vectors[1:])


def test_the_number_type_sets_the_tolerance(folders):
    proof = replace(read_proof(folders / "biencoder"), tolerance={"float32": 0.9999, "int8": 0.9})
    noise = np.random.default_rng(0).standard_normal(proof.vectors.shape)
    near = proof.vectors + 0.05 * noise / np.sqrt(noise.shape[1])
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    assert not check(proof, lambda texts: near).same
    assert check(proof, lambda texts: near, "int8").same


def code_of_card(folder, kind, **given):
    """The code of the card's section, for a folder."""
    plain = tiny_settings(kind).has_plain_format
    (code,) = re.findall(r"```python\n(.*?)```", proof_section("m", plain=plain, **given), re.S)
    assert len(code.splitlines()) <= 32
    assert "rayembed" not in code.replace("# of `rayembed serve`", "")
    return code.replace(FOLDER, str(folder))


def test_the_code_of_the_card_checks_a_copy(folders, tmp_path, capsys):
    exec(code_of_card(folders / "biencoder", "biencoder"), {})
    assert re.search(
        r"cosine (1\.0000|0\.9999).*\nlengths 1\.000 to 1\.000", capsys.readouterr().out
    )
    folder = copied(folders / "biencoder", tmp_path / "model")
    path = folder / "1_Pooling" / "config.json"
    modes = json.loads(path.read_text())
    modes |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    path.write_text(json.dumps(modes))
    with pytest.raises(AssertionError):
        exec(code_of_card(folder, "biencoder"), {})


def test_the_code_of_the_card_knows_different_lengths(tmp_path):
    lengths = {"query_max_length": 12, "document_max_length": 24}
    parts = tiny_parts("biencoder", tmp_path / "parts")
    model = contract.moved(build_model(tiny_settings("biencoder", **lengths), parts, seed=1))
    model.save(tmp_path / "model")
    write_proof(tmp_path / "model")
    exec(code_of_card(tmp_path / "model", "biencoder", max_lengths=model.config.max_lengths), {})
    with pytest.raises(AssertionError):
        exec(code_of_card(tmp_path / "model", "biencoder"), {})


def tightened(folder, proof):
    """The proof with a tolerance of float32 that bfloat16 exceeds even in a tiny model."""
    proof = replace(proof, tolerance={**proof.tolerance, "float32": 0.999_995})
    proof.write(folder)
    return proof


def test_the_code_of_the_card_loads_bfloat16_weights_in_float32(tmp_path):
    folder = save_proved(tmp_path / "model", "last")
    weights = {
        name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings.pop("torch_dtype", None)
    path.write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    proof = tightened(folder, write_proof(folder))
    plain = SentenceTransformer(str(folder), device="cpu")
    assert plain.dtype == torch.bfloat16
    found = plain.encode([one.prompt + one.text for one in proof.texts[:16]], prompt="")
    cosines = (found * proof.vectors[:16]).sum(1) / np.linalg.norm(found, axis=1)
    assert cosines.min() < proof.tolerance["float32"]
    exec(code_of_card(folder, "biencoder"), {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_code_of_the_card_asks_a_server(dtype, folders, tmp_path, monkeypatch):
    folder = copied(folders / "nvembed", tmp_path / "model")
    tightened(folder, read_proof(folder))
    model = load_model(folder, dtype=dtype)

    def answer(request):
        asked = json.loads(request.data)
        assert request.full_url == "http://localhost:8000/v1/embeddings"
        vector = encode(
            model, asked["input"], role=asked["role"], instruction=asked.get("instruction")
        )
        return io.BytesIO(json.dumps({"data": [{"embedding": vector.tolist()}]}).encode())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    exec(code_of_card(folder, "nvembed"), {})


def test_a_tolerance_is_three_times_the_models_own_rounding_and_never_below_0_9():
    right = np.eye(4, dtype=np.float32)[:1]

    def rounded(cosine):
        vector = np.array([[cosine, np.sqrt(1 - cosine**2), 0, 0]], np.float32)
        return tolerances(right, [Mistake("int8", "", "", (0,), vector)])["int8"]

    assert rounded(0.99) == pytest.approx(0.97, abs=1e-5)
    assert rounded(0.99999) == 0.9999
    assert rounded(0.5) == 0.9
    assert tolerances(right, []) == TOLERANCE


def copied(folder, target):
    return shutil.copytree(folder, target)


def test_a_model_that_is_uploaded_has_a_proof(folders, tmp_path):
    def save(place):
        model = load_model(folders / "biencoder")
        model.save(place, instructions={"Questions": "Find answers"})

    upload_model(str(tmp_path / "model"), b"1", save)
    proof = read_proof(tmp_path / "model")
    assert np.array_equal(proof.vectors, read_proof(folders / "biencoder").vectors)
    upload_model(str(tmp_path / "adapted"), b"1", save, embeds=False)
    assert not (tmp_path / "adapted" / "proof").exists()


def test_a_proof_names_the_packages_that_computed_it(folders):
    proof = read_proof(folders / "biencoder")
    assert proof.made_by["torch"] == torch.__version__
    assert {"rayembed", "transformers", "tokenizers"} <= {*proof.made_by}
    assert changed_packages(proof) == ""
    other = replace(proof, made_by={**proof.made_by, "torch": "1.0"})
    assert f"torch 1.0 (here {torch.__version__})" in changed_packages(other)


def test_a_proof_changes_no_identity_of_the_folder(folders, tmp_path):
    folder = copied(folders / "biencoder", tmp_path / "model")
    before = weights_fingerprint(folder), count_parameters(folder)
    shutil.rmtree(folder / "proof")
    assert (weights_fingerprint(folder), count_parameters(folder)) == before
    assert read_proof(folder) is None
    SentenceTransformer(str(folder), device="cpu")


def test_a_proof_of_other_weights_is_refused_and_written_again(folders, tmp_path):
    folder = copied(folders / "biencoder", tmp_path / "model")
    first = write_proof(folder)
    path = folder / "proof" / "proof.json"
    written = path.stat().st_mtime_ns
    assert write_proof(folder).weights == first.weights
    assert path.stat().st_mtime_ns == written  # one of these weights stays
    model = load_model(folder)
    model.save(tmp_path / "other")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"changed": 1}))
    with pytest.raises(ArtifactError, match=f"to the weights {first.weights}, but the folder has"):
        read_proof(folder)
    assert write_proof(folder).weights != first.weights
    assert read_proof(folder) is not None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda p: (p / "vectors.safetensors").unlink(),
            "cannot read the model's reference vectors",
        ),
        (lambda p: (p / "vectors.safetensors").write_bytes(b"x" * 40), "cannot read the model's"),
        (lambda p: (p / "proof.json").write_text("{"), "cannot read"),
        (
            lambda p: rewritten(p, format=3),
            "have format 3, but this version of rayembed reads format 2",
        ),
        (lambda p: rewritten(p, made_by=None), "are damaged"),
        (lambda p: rewritten(p, texts=[]), "are damaged"),
        (lambda p: rewritten(p, dimensions=[]), "are damaged"),
        (lambda p: rewritten(p, tolerance=None), "are damaged"),
    ],
)
def test_a_damaged_proof_is_refused(damage, said, folders, tmp_path):
    folder = copied(folders / "biencoder", tmp_path / "model")
    damage(folder / "proof")
    with pytest.raises(ArtifactError, match=said):
        read_proof(folder)


def test_a_proof_of_an_earlier_format_counts_as_none_with_a_warning(folders, tmp_path, caplog):
    folder = copied(folders / "biencoder", tmp_path / "model")
    rewritten(folder / "proof", format=1)
    assert read_proof(folder) is None
    assert "have the earlier format 1 and are not compared" in caplog.text
    write_proof(folder)
    assert read_proof(folder) is not None


def rewritten(place, **changes):
    values = json.loads((place / "proof.json").read_text())
    (place / "proof.json").write_text(json.dumps(values | changes))


def test_a_loaded_model_in_another_number_type_keeps_the_loosest_tolerance(folders):
    proof = read_proof(folders / "biencoder")
    assert proof.dtype == "float32"
    assert tolerated(proof, "float32") == "float32"
    least = min(proof.tolerance.values())
    for computed in ("bfloat16", "float16", "int8"):
        assert proof.tolerance[tolerated(proof, computed)] == least
