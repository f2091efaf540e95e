"""Texts at usual lengths and around the limit, and the cuts that they show."""

import pytest
from architecture_contract import moved, of_corpus
from proved_models import save_proved
from sentence_transformers import SentenceTransformer
from tiny_folders import KINDS, tiny_parts, tiny_settings

from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.proof.proof import read_proof
from rayembed.proof.write import prove
from rayembed_extras.verification import long_texts as module
from rayembed_extras.verification import verify
from rayembed_extras.verification.long_texts import long_texts

LENGTH = 1_500
"""Maximum tokens of the long model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_proved(tmp_path_factory.mktemp("long") / "model", "last", LENGTH)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def read_by(model, text, limit):
    """Tokens of a text where the limit is another."""
    tokenizer = model.tokenizer
    own = tokenizer.max_lengths
    tokenizer.max_lengths = dict.fromkeys(own, limit)
    (made,) = tokenizer.with_prompts([text.text], [text.prompt], text.role)
    tokenizer.max_lengths = own
    return len(made["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_both_roles_have_texts_around_the_limit(kind, tmp_path):
    parts = tiny_parts(kind, tmp_path / "parts")
    model = of_corpus(moved(build_model(tiny_settings(kind), parts, seed=1)))
    texts, left_out = long_texts(model)
    assert left_out == []
    for role in ("query", "document"):
        limit = model.tokenizer.max_lengths[role]
        for name, extra in (("limit - 1", -1), ("limit", 0), ("limit + 1", 1)):
            (text,) = (t for t in texts if t.about == f"{role} of {name} tokens")
            assert text.tokens == limit + extra == read_by(model, text, limit + 10)
            assert read_by(model, text, limit) == min(limit, limit + extra)


def test_documents_of_usual_lengths_are_not_cut(model):
    texts = {text.tokens: text for text in long_texts(model)[0]}
    for number in (300, 600, 1_280, LENGTH + 1):
        assert read_by(model, texts[number], 10_000) == number
    assert not {2_560, 5_120} & {*texts}


def test_costly_texts_are_left_out_with_the_reason(model, monkeypatch):
    def lengths():
        texts, left_out = long_texts(model)
        return [text.tokens for text in texts], left_out

    monkeypatch.setattr(module, "_TOKENS_OF_LARGE", 0)
    monkeypatch.setattr(module, "_operations", lambda model, tokens: float(tokens))
    monkeypatch.setattr(module, "MOST_OPERATIONS", 2_500.0)
    tokens, (why,) = lengths()
    # The longest shows a cut at any length.
    assert tokens == [LENGTH + 1, 300, 600]
    assert why.startswith("document of 1280 tokens, query of limit + 1 tokens, document of limit")
    monkeypatch.setattr(module, "MOST_OPERATIONS", 1_400.0)
    assert lengths()[0] == [1_280]
    monkeypatch.setattr(module, "MOST_OPERATIONS", 10.0)
    assert lengths()[0] == [300], "one in any case"
    monkeypatch.setattr(module, "MOST_OPERATIONS", 1e9)
    monkeypatch.setattr(module, "_MOST_TOKENS", 2_000)
    assert lengths()[0] == [LENGTH + 1, 300]


def test_a_model_of_hundred_million_parameters_has_a_text_of_8193_tokens(model, monkeypatch):
    """And one of seven billion a document of 600."""
    for width, parameters, longest in ((576, 106e6, 8_193), (1024, 440e6, 2_560), (4096, 7e9, 600)):
        limits = {"query": 8_192, "document": 8_192}
        monkeypatch.setattr(model.tokenizer, "max_lengths", limits)
        monkeypatch.setattr(model, "dimensions", (width,))
        monkeypatch.setattr(module, "num_parameters", lambda _, number=parameters: int(number))
        texts, left_out = long_texts(model)
        assert texts[0].tokens == longest
        assert left_out
        assert sum(len(text.text.encode()) for text in texts) < 100_000


@pytest.mark.parametrize("characters", [1_300, 2_600, 5_500, 11_000, 22_000])
def test_the_end_of_a_text_has_another_subject(characters):
    """So that a cut changes the mean over tokens."""
    text = module._story(characters)
    head, end = ({*part.split()} for part in (text[:400], text[int(0.8 * characters) :][:400]))
    assert len(head & end) < 0.5 * len(head)


@pytest.mark.parametrize("cut", [128, 700, 1_024, LENGTH - 60, LENGTH])
def test_a_cut_at_any_length_is_named(cut, folder):
    served = SentenceTransformer(str(folder), device="cpu")
    served.max_seq_length = served[0].query_length = served[0].document_length = cut
    verdict = verify(served, folder, repeat=1)
    assert verdict.same == (cut == LENGTH), verdict.line
    if verdict.same:
        return
    (name,) = verdict.mistakes
    assert abs(int(name.removeprefix("cut_at_")) / cut - 1) < 0.08
    if cut in (128, 1_024):
        assert name == f"cut_at_{cut}"
    assert f"sentence-transformers: set model.max_seq_length = {LENGTH}" in verdict.advice


def test_another_fault_of_long_texts_is_no_cut(folder, model):
    """A server that reads positions otherwise, as with a wrong scale: every token counts."""
    served = SentenceTransformer(str(folder), device="cpu")
    served.max_seq_length = LENGTH
    rotary = served[0].auto_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / 2
    verdict = verify(served, folder, repeat=1)
    assert not verdict.same
    assert not any(name.startswith("cut_at") for name in verdict.mistakes), verdict.line


def test_a_large_model_has_few_texts_of_each_mistake(tmp_path, monkeypatch):
    model = load_model(save_proved(tmp_path / "model", "last"))
    whole = prove(model, {})
    monkeypatch.setattr("rayembed.proof.texts.num_parameters", lambda _: 3 * 10**9)
    few = prove(model, {})
    names = {one.name for one in whole.mistakes if not one.name.startswith("cut_at_")}
    assert {one.name for one in few.mistakes} == names
    assert max(len(one.texts) for one in few.mistakes) == 4
    (eos,) = (one for one in few.mistakes if one.name == "no_eos")
    assert {few.texts[i].role for i in eos.texts} == {"query", "document"}


def test_the_proof_says_what_it_leaves_out(folder, monkeypatch):
    proof = read_proof(folder)
    assert proof.left_out == ()
    monkeypatch.setattr(module, "MOST_OPERATIONS", 10.0)
    short = prove(load_model(folder), {})
    notes = verify(folder, short, repeat=1).notes
    assert "the proof leaves out document of 600 tokens" in notes[-1]
    assert f"no text is as long as the model's limit of {LENGTH} tokens" in notes[-2]
