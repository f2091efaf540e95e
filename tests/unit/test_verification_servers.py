"""Servers over HTTP against a model's proof: planted mistakes, schemas, faults of servers."""

import json
from dataclasses import replace

import numpy as np
import pytest
from mistaken_server import PlainEmbedder, mistaken_server
from proved_models import save_proved

from rayembed.errors import ArtifactError, AssetError, ConfigError
from rayembed.proof.proof import read_proof
from rayembed_extras.verification import verify
from rayembed_extras.verification.job import DIFFERS, run_verify_job

MISTAKES = [
    ("mean", "no prompt", "no_prompt", "no prompt before the texts"),
    ("mean", "wrong role", "wrong_role", "the prompts of queries and documents exchanged"),
    ("mean", "cls pooling", "cls_pooling", "CLS pooling where the model has mean pooling"),
    ("cls", "mean pooling", "mean_pooling", "mean pooling where the model has CLS pooling"),
    ("mean", "last pooling", "last_token_pooling", "last-token pooling where the model has mean"),
    ("last", "mean pooling", "mean_pooling", "mean pooling where the model has last-token pooling"),
    ("last", "no EOS", "no_eos", "the end token <|end|> missing"),
    ("last", "double EOS", "double_eos", "the end token <|end|> twice"),
    ("cls", "no BOS", "no_bos", "the first token [CLS] missing"),
    ("last", "double BOS", "double_bos", "the first token <|begin|> twice"),
    ("cls", "double BOS", "double_bos", "the first token [CLS] twice"),
    ("last", "lower case", "lower_cased", "texts turned to lower case"),
    ("mean", "no normalisation", "no_normalisation", "vectors that are not of length 1"),
    ("mean", "no head", "no_dense", "vectors of 32 numbers where the model has 24"),
    ("mean", "cut at 256", "cut_at_256", "texts cut at 256 tokens"),
    ("cls", "width", "cut_to_16", "vectors cut to 16 numbers where the model has 32"),
]
"""Model by its pooling, mistake of the stub, its name in proofs, and words of the verdict."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder, proof, and embedders in float32 and int8 of each kind of model."""
    made = {}

    def model(kind):
        if kind not in made:
            folder = save_proved(tmp_path_factory.mktemp(kind) / "model", kind)
            embedders = {int8: PlainEmbedder(folder, int8=int8) for int8 in (False, True)}
            made[kind] = folder, _of_mistakes(read_proof(folder)), embedders
        return made[kind]

    return model


def _of_mistakes(proof):
    """The proof with the texts of its mistakes and the longest alone: half the requests."""
    kept = {i for one in proof.mistakes for i in one.texts}
    kept |= {i for i, text in enumerate(proof.texts) if "limit" in text.about}
    order = sorted(kept)
    mistakes = (replace(m, texts=tuple(map(order.index, m.texts))) for m in proof.mistakes)
    texts = tuple(proof.texts[i] for i in order)
    return replace(proof, texts=texts, vectors=proof.vectors[order], mistakes=tuple(mistakes))


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize(("kind", "mistake", "name", "words"), MISTAKES)
def test_a_planted_mistake_is_named(kind, mistake, name, words, int8, models):
    _, proof, embedders = models(kind)
    by_server = mistake in ("no prompt", "wrong role")  # else the client sends the prompt
    how = {"schema": "tei", "prompts": "server"} if by_server else {}
    with mistaken_server(embedders[int8], mistake) as url:
        verdict = verify(url, proof, repeat=1, within="int8" if int8 else "bfloat16", **how)
    assert not verdict.same
    assert verdict.mistakes == (name,), verdict.line
    assert words in verdict.line
    assert verdict.advice


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_the_right_model_is_the_same_within_its_number_type(kind, int8, models):
    _, proof, embedders = models(kind)
    with mistaken_server(embedders[int8]) as url:
        verdict = verify(url, proof, within="int8" if int8 else "bfloat16")
    assert verdict.same, verdict.line
    assert verdict.number_type in (("float32",) if not int8 else ("float32", "bfloat16", "int8"))
    if verdict.number_type == "float32":
        assert verdict.line.startswith("same vectors (cosine ≥ 0.9999")
    else:
        assert verdict.line.startswith(f"same within the tolerance of {verdict.number_type} (")
    if not int8:
        assert verify(embedders[False], proof, within="float32", repeat=1).same


@pytest.mark.parametrize("given", ["", "/api", "/embeddings"])
def test_a_server_of_openais_schema_without_a_version(given, models):
    _, proof, embedders = models("cls")
    seen = []
    right = given.removesuffix("/embeddings") + "/embeddings"

    def other_path(path, body, vectors):
        return None if path == right else (404, {})

    with mistaken_server(embedders[False], seen=seen, fault=other_path) as url:
        verdict = verify(url + given, proof, repeat=1)
    assert verdict.same, verdict.line
    assert seen[-1]["path"] == right
    if given.endswith("/embeddings"):
        assert {one["path"] for one in seen} == {right}


@pytest.mark.parametrize("takes_field", [True, False])
@pytest.mark.parametrize("schema", ["openai", "tei", "cohere"])
def test_a_server_is_asked_for_fewer_numbers(schema, takes_field, models):
    _, proof, embedders = models("cls")
    field = "output_dimension" if schema == "cohere" else "dimensions"
    asked = []

    def cut(texts, mistake, role):
        vectors = embedders[False](texts)[:, :16]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def refuse(path, body, vectors):
        asked.append(body.get(field))
        return (400, {}) if field in body and not takes_field else None

    with mistaken_server(cut, fault=refuse) as url:
        how = {"schema": schema, "prompts": "client", "repeat": 1}
        verdict = verify(url, proof, dimensions=16, **how)
    assert verdict.same, verdict.line
    assert asked[0] == 16
    assert set(asked[1:]) == ({16} if takes_field else {None})


@pytest.mark.parametrize("refuses", [True, False])
def test_a_server_that_does_not_cut(refuses, models, capsys):
    _, proof, embedders = models("cls")

    def refuse(path, body, vectors):
        return (400, {}) if refuses and "dimensions" in body else None

    with mistaken_server(embedders[False], fault=refuse) as url:
        verdict = verify(url, proof, dimensions=16, schema="openai", repeat=1)
    assert verdict.mistakes == ("not_cut",)
    assert "all 32 numbers of the vectors: the target did not cut them to 16" in verdict.line
    assert "requests ask for it by dimensions (Cohere's schema: output_dim" in verdict.advice[0]
    assert any("vLLM: start it with --hf-overrides" in one for one in verdict.advice)


def test_int8_is_refused_where_float32_is_asked_for(models):
    _, proof, embedders = models("last")
    verdict = verify(embedders[True], proof, within="float32", repeat=1)
    assert not verdict.same
    assert "by none of the known mistakes" in verdict.line


def test_slightly_other_weights_pass_only_where_int8_is_stated(models):
    """Another checkpoint of a model is as near to it as rounding to int8."""
    _, proof, embedders = models("last")
    drawn = np.random.default_rng(0)
    cosine = (proof.tolerance["int8"] + proof.tolerance["bfloat16"]) / 2
    moved = {}

    def noisy(texts):
        right = embedders[False](texts)
        for text, row in zip(texts, right, strict=True):
            noise = drawn.normal(size=row.shape)
            noise -= noise @ row * row
            moved.setdefault(
                text, cosine * row + np.sqrt(1 - cosine**2) * noise / np.linalg.norm(noise)
            )
        return np.stack([moved[text] for text in texts])

    assert verify(noisy, proof, repeat=1, within="int8").same
    verdict = verify(noisy, proof, repeat=1)
    assert not verdict.same
    assert "int8 rounds as far: --within int8 if the server does" in verdict.line


def test_texts_that_nearly_all_differ_are_not_cut(models):
    _, proof, embedders = models("last")
    shortest = min(len(one.prompt + one.text) for one in proof.texts)

    def other(texts):
        found = embedders[False](texts)
        rows = [
            row if len(text) == shortest else row[::-1]
            for row, text in zip(found, texts, strict=True)
        ]
        return np.stack(rows)

    verdict = verify(other, proof, repeat=1)
    assert not verdict.same
    assert "the longest texts alone" not in verdict.line


def test_mistakes_that_give_the_same_vectors_are_named_together(models):
    _, proof, embedders = models("cls")
    (mean,) = (one for one in proof.mistakes if one.name == "mean_pooling")
    twin = replace(mean, name="twin", what="another mistake of these vectors")
    both = replace(proof, mistakes=(*proof.mistakes, twin))
    made = verify(lambda texts: embedders[False](texts, "mean pooling"), both, repeat=1)
    assert set(made.mistakes) == {"mean_pooling", "twin"}
    assert "mean pooling where the model has CLS pooling or another mistake" in made.line
    assert "cannot be told apart" in made.line


def test_another_model_is_no_known_mistake(models):
    _, proof, _ = models("cls")
    drawn = np.random.default_rng(0)
    verdict = verify(lambda texts: _unit(drawn.normal(size=(len(texts), 32))), proof, repeat=1)
    assert (verdict.same, verdict.mistakes) == (False, ())
    assert "by none of the known mistakes" in verdict.line
    wide = verify(lambda texts: _unit(drawn.normal(size=(len(texts), 40))), proof, repeat=1)
    assert wide.line.startswith("vectors of 40 numbers where the model has 32")


def _unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("path", "asked", "sent"),
    [
        ("", {}, "/v1/embeddings"),
        ("/v1", {}, "/v1/embeddings"),
        ("/v1/embeddings/", {"encoding": "base64"}, "/v1/embeddings"),
        ("/embed", {}, "/embed"),
        ("", {"schema": "tei"}, "/embed"),
        ("/v2/embed", {"prompts": "client"}, "/v2/embed"),
        ("", {"schema": "cohere"}, "/v2/embed"),
    ],
)
def test_schemas_and_addresses(path, asked, sent, models):
    _, proof, embedders = models("mean")
    seen = []
    with mistaken_server(embedders[False], seen=seen) as url:
        verdict = verify(url + path, proof, repeat=1, key="secret", **asked)
    assert verdict.same, verdict.line
    assert {one["path"] for one in seen} == {sent}
    assert {one["key"] for one in seen} == {"Bearer secret"}
    if sent == "/v1/embeddings":
        assert {one["model"] for one in seen} == {"small"}
        assert {one["encoding_format"] for one in seen} == {asked.get("encoding", "float")}
    if sent == "/embed":
        assert all(one["truncate"] is True for one in seen)
    if asked.get("schema") == "cohere":  # roles are the schema's own
        assert {one["input_type"] for one in seen} == {"search_query", "search_document"}
        assert not any(text.startswith("where ") for one in seen for text in one["texts"])
    else:
        texts = [one.get("input") or one.get("inputs") or one["texts"] for one in seen]
        assert any(text.startswith("where ") for sent in texts for text in sent)


def test_who_puts_the_prompt_is_said(models):
    _, proof, embedders = models("mean")
    with mistaken_server(embedders[False]) as url:
        by_client = verify(url, proof, repeat=1)
        by_nobody = verify(url, proof, repeat=1, prompts="server")
    assert "the client sends the prompt as part of the text" in by_client.notes[0]
    assert "the server puts the prompt" in by_nobody.notes[0]
    assert by_nobody.mistakes == ("no_prompt",)


def _fault(change):
    def fault(path, body, vectors):
        made = change(body.get("input") or body.get("inputs"), vectors.tolist())
        if isinstance(made, tuple):
            return made
        return 200, {"data": [{"index": i, "embedding": row} for i, row in enumerate(made)]}

    return fault


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda _, rows: rows[:-1] if len(rows) > 1 else rows,
            ArtifactError,
            r"gives \d+ vectors for \d+ texts; it must",
        ),
        (lambda _, rows: [[None] * len(rows[0])] * len(rows), ArtifactError, "not finite"),
        (lambda *_: (401, {"error": "no key"}), AssetError, "--api-key-env"),
        (lambda *_: (404, {"error": "none"}), AssetError, "no embedding server answers"),
        (lambda *_: (200, {"data": "none"}), AssetError, "does not have the expected schema"),
        (lambda texts, rows: [rows[0][: 9 + len(texts)]] * len(rows), ArtifactError, "several wid"),
    ],
)
def test_faults_of_servers_are_errors(change, error, words, models):
    _, proof, embedders = models("mean")
    with (
        mistaken_server(embedders[False], fault=_fault(change)) as url,
        pytest.raises(error, match=words),
    ):
        verify(url, proof, repeat=1)


def test_a_server_that_is_away_is_an_error(models):
    _, proof, embedders = models("mean")
    with mistaken_server(embedders[False]) as url:
        pass
    with pytest.raises(AssetError, match="does not answer"):
        verify(url, proof)


def test_a_batch_that_pads_wrongly_is_seen(models):
    """Alone each text is right, so that one request for each proves nothing."""
    _, proof, embedders = models("cls")

    def pads_in_front(texts, rows):
        return rows if len(rows) == 1 else embedders[False](texts, "mean pooling").tolist()

    with mistaken_server(embedders[False], fault=_fault(pads_in_front)) as url:
        verdict = verify(url, proof, repeat=1)
    assert verdict.line.startswith("in a batch, mean pooling where the model has CLS pooling")
    assert verdict.as_json()["cosine_alone"] > 0.9999

    def mixes(texts, rows):
        return rows if len(rows) == 1 else (0.9 * np.array(rows) + 0.1 * np.array(rows[0])).tolist()

    with mistaken_server(embedders[False], fault=_fault(mixes)) as url:
        verdict = verify(url, proof, repeat=1)
    assert not verdict.same
    assert "in a batch" in verdict.line


def test_a_server_with_moods_is_seen(models):
    """Right vectors by luck in the first call, as of a race on a device."""
    _, proof, embedders = models("cls")
    calls = {}

    def moody(texts, rows):
        calls[texts[0]] = calls.get(texts[0], 0) + 1
        turned = len(rows) == 1 and calls[texts[0]] > 2
        return (np.array(rows) + [0.3] * 32 * turned).tolist() if turned else rows

    with mistaken_server(embedders[False], fault=_fault(moody)) as url:
        verdict = verify(url, proof, repeat=3)
    assert "another vector for the same text in another call" in verdict.line


def test_texts_that_are_too_long_may_be_refused_but_no_shorter_ones(models):
    _, proof, embedders = models("last")
    long = {one.prompt + one.text for one in proof.texts if "limit + 1" in one.about}
    short = next(one.prompt + one.text for one in proof.texts if one.about == "a question")

    def refuses(which):
        def change(texts, rows):
            return (400, {"error": "too long"}) if which & {*texts} else rows

        return _fault(change)

    with mistaken_server(embedders[False], fault=refuses(long)) as url:
        verdict = verify(url, proof, repeat=1)
    assert verdict.same
    assert len(long) == 2
    assert any("2 texts beyond the length limit are refused" in note for note in verdict.notes)
    with mistaken_server(embedders[False], fault=refuses({short})) as url:
        verdict = verify(url, proof, repeat=1)
    assert verdict.line.startswith("1 texts within the length limit are refused (a question: HTTP")


def test_exit_codes_lines_and_json(models, capsys):
    folder, _, embedders = models("cls")
    with mistaken_server(embedders[False], "mean pooling") as url:
        code = run_verify_job([url, "--proof", str(folder), "--repeat", "1"])
        told = capsys.readouterr()
        as_json = run_verify_job([url, "--proof", str(folder), "--repeat", "1", "--json"])
    assert (code, as_json) == (DIFFERS, DIFFERS) == (3, 3)
    first, *rest = told.out.splitlines()
    assert first.startswith("mean pooling where the model has CLS pooling; cosine 0.")
    assert any(
        'vLLM: start it with --pooler-config \'{"pooling_type": "CLS"}\'' in one for one in rest
    )
    assert "the client sends the prompt" in told.err
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["mistakes"]) == (False, ["mean_pooling"])
    with mistaken_server(embedders[False]) as url:
        assert run_verify_job([url, "--proof", str(folder), "--repeat", "1"]) == 0
    assert capsys.readouterr().out.startswith("same vectors (cosine ≥ 0.9999")
    assert run_verify_job([url]) == 2
    assert "--proof" in capsys.readouterr().err


def test_a_server_of_several_models_needs_a_name(models):
    from rayembed_extras.verification.servers import _only

    with pytest.raises(ConfigError, match=r"--model-name: one, other"):
        _only("http://x", ["one", "other"])
