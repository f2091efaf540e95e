"""The usual mistakes in a proof, for every architecture, against other ways to make them."""

from dataclasses import replace

import architecture_contract as contract
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_folders import KINDS, tiny_parts, tiny_settings

from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.proof.check import cosines
from rayembed.proof.proof import read_proof
from rayembed.proof.write import TOLERANCE, prove, write_proof
from rayembed_extras.verification import wrong_passes

ALWAYS = {"no_prompt", "no_normalisation", "no_eos", "double_eos", "double_bos"}
OTHER_POOLINGS = {"cls_pooling", "last_token_pooling"}
EXPECTED = {
    "biencoder": {"no_bos", "wrong_role", *OTHER_POOLINGS, "cut_to_16"},
    "biencoder, projected": {
        "no_bos",
        "wrong_role",
        "mean_pooling",
        "cls_pooling",
        "no_dense",
        "cut_to_12",
    },
    "nvembed": {
        "no_bos",
        "mean_pooling",
        *OTHER_POOLINGS,
        "no_head",
        "causal_mask",
        "lower_cased",
        "cut_at_128",
        "cut_at_256",
        "cut_to_16",
    },
    "nvembed, causal": {
        "no_bos",
        "mean_pooling",
        "cls_pooling",
        "lower_cased",
        "cut_at_128",
        "cut_at_256",
        "cut_to_16",
    },
    "nomic-moe": {"no_bos", "wrong_role", *OTHER_POOLINGS, "cut_to_16"},
    "cde": {"no_bos", "wrong_role", *OTHER_POOLINGS, "no_corpus", "cut_to_16"},
    "causal2vec": {"mean_pooling", *OTHER_POOLINGS, "lower_cased", "cut_to_32"},
}
"""Model → names of its mistakes beside `ALWAYS` and roundings. A tokenizer that lower-cases cannot
see that mistake, nor a model of 48 tokens a cut at 256."""
CHANGES = {
    "biencoder, projected": {"pooling": {"kind": "eos"}, "projections": [{"width": 24}]},
    "nvembed, causal": {"mask": "causal", "pooling": {"kind": "eos"}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models with proofs, by name."""
    home = tmp_path_factory.mktemp("mistakes")
    for name in EXPECTED:
        kind = name.partition(",")[0]
        parts = tiny_parts(kind, home / f"{name}-parts")
        settings = tiny_settings(kind, **CHANGES.get(name, {}))
        model = contract.of_corpus(contract.moved(build_model(settings, parts, seed=1)))
        model.save(home / name, instructions={"Questions": "Find answers"})
        write_proof(home / name)
    return home


def mistake_of(folder, name):
    proof = read_proof(folder)
    (mistake,) = (one for one in proof.mistakes if one.name == name)
    return mistake, [proof.texts[i] for i in mistake.texts], proof.vectors[list(mistake.texts)]


def near(found, mistake):
    np.testing.assert_allclose(found, mistake.vectors, atol=2e-3)  # float16 keeps 3 digits


def test_every_architecture_is_here():
    assert {name.partition(",")[0] for name in EXPECTED} == set(KINDS)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_mistakes_are_those_that_the_model_can_be_served_with(name, folders):
    proof = read_proof(folders / name)
    found = {mistake.name for mistake in proof.mistakes} - {"bfloat16", "int8"}
    assert found == ALWAYS | EXPECTED[name]
    for mistake in proof.mistakes:
        assert 0 < len(mistake.texts) <= 8
        assert mistake.what
        assert mistake.advice
        near, lengths = cosines(mistake.vectors, proof.vectors[list(mistake.texts)])
        assert near.min() < TOLERANCE["float32"] or abs(lengths - 1).max() > 0.01


@pytest.mark.parametrize("name", EXPECTED)
def test_the_model_is_as_before(name, folders):
    model = load_model(folders / name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = encode(model, contract.TEXTS, role="query")
    proof = prove(model, {"Questions": "Find answers"})
    assert proof.mistakes
    assert np.array_equal(encode(model, contract.TEXTS, role="query"), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", EXPECTED)
def test_rounding_sets_the_tolerances(name, folders):
    proof = read_proof(folders / name)
    assert proof.tolerance["float32"] == 0.9999
    assert 0.99 < proof.tolerance["bfloat16"] <= 0.9999
    assert 0.9 < proof.tolerance["int8"] <= 0.9999
    assert proof.tolerance["int8"] != TOLERANCE["int8"]
    model = load_model(folders / name, dtype="bfloat16")
    found = np.stack(
        [encode(model, x.text, role=x.role, instruction=x.instruction) for x in proof.texts]
    )
    assert cosines(found, proof.vectors)[0].min() >= proof.tolerance["bfloat16"]


def test_poolings_prompt_dense_and_normalisation_are_those_of_sentence_transformers(folders):
    folder = folders / "biencoder, projected"
    for name, change in {
        "mean_pooling": lambda m: setattr(m[1], "pooling_mode", "mean"),
        "cls_pooling": lambda m: setattr(m[1], "pooling_mode", "cls"),
        "no_dense": lambda m: m.__delitem__(2),
        "no_normalisation": lambda m: m.__delitem__(len(m) - 1),
        "no_prompt": lambda m: None,
    }.items():
        model = SentenceTransformer(str(folder), device="cpu")
        change(model)
        mistake, texts, _ = mistake_of(folder, name)
        prompts = ["" if name == "no_prompt" else text.prompt for text in texts]
        found = [
            model.encode(text.text, prompt=prompt)
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        near(np.stack(found), mistake)


def test_the_causal_mask_and_the_missing_head_are_those_of_other_settings(folders):
    model = load_model(folders / "nvembed")
    causal = model.config.model_copy(update={"mask": "causal"})
    parts = {"backbone": folders / "nvembed-parts" / "backbone"}
    other = build_model(replace_lora(causal), parts, seed=1).eval()
    other.load_state_dict(model.state_dict())
    mistake, texts, right = mistake_of(folders / "nvembed", "causal_mask")
    near(embedded(other, texts), mistake)
    assert cosines(mistake.vectors, right)[0].max() < 0.99
    pooling = tiny_settings("nvembed", pooling={"kind": "mean"}).pooling
    mean = replace_lora(model.config.model_copy(update={"pooling": pooling}))
    other = build_model(mean, parts, seed=1).eval()
    other.backbone.load_state_dict(model.backbone.state_dict())
    mistake, texts, _ = mistake_of(folders / "nvembed", "no_head")
    near(embedded(other, texts), mistake)


def replace_lora(config):
    return config.model_copy(update={"lora": None})


def embedded(model, texts):
    return np.stack([encode(model, x.text, role=x.role, instruction=x.instruction) for x in texts])


def test_roles_and_lengths_are_those_of_the_tokenizer(folders):
    model = load_model(folders / "nomic-moe")
    mistake, texts, _ = mistake_of(folders / "nomic-moe", "wrong_role")
    turned = [
        replace(x, role="document" if x.role == "query" else "query", instruction=None)
        for x in texts
    ]
    near(embedded(model, turned), mistake)
    model = load_model(folders / "nvembed")
    mistake, texts, _ = mistake_of(folders / "nvembed", "cut_at_256")
    model.tokenizer.max_lengths = dict.fromkeys(model.tokenizer.max_lengths, 256)
    near(embedded(model, texts), mistake)


def test_int8_rounds_weights_and_inputs_of_linear_layers(folders):
    model = load_model(folders / "nvembed")
    seen = []
    layer = next(m for m in model.backbone.modules() if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        exact = layer.weight.clone()
        with wrong_passes._quantised(layer):
            layer.register_forward_hook(lambda m, x, y: seen.append((x[0], y)))
            whole = torch.randn(5, layer.in_features)
            layer(whole)
    ((inputs, output),) = seen
    scale = whole.abs().amax(1, keepdim=True) / 127  # of each token
    torch.testing.assert_close(inputs, (whole / scale).round() * scale)
    assert not torch.allclose(inputs, whole, atol=1e-6)
    row = exact.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(output, inputs @ ((exact / row).round() * row).T, atol=1e-5, rtol=0)
    assert torch.equal(layer.weight, exact)
