"""Which texts may be in a record: those of which every tokenizer makes a token."""

import sys

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_level_tokenizer, metaspace_tokenizer, wordpiece_tokenizer

from rayembed.assets.resolver import resolve_model
from rayembed.config.types import has_content
from rayembed.data.records import reject_reason
from rayembed.recipes.sample import MINILM, SMOLLM2

# Half of the texts are made of what normalisers strip, so that the check decides about them.
TEXTS = st.one_of(
    st.text(max_size=8),
    st.lists(
        st.sampled_from([*"\u200b\u0301\ufffd\x00\t \xad\ufe0f\u3164", "a", "é", "🥰"]), max_size=6
    ).map("".join),
)


@pytest.fixture(scope="module")
def tiny():
    return [
        made().backend_tokenizer
        for made in (metaspace_tokenizer, byte_level_tokenizer, wordpiece_tokenizer)
    ]


def num_tokens(backend, texts):
    return [len(e.ids) for e in backend.encode_batch(texts, add_special_tokens=False)]


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_a_text_that_passes_has_a_token(tiny, text):
    if has_content(text):
        assert all(num_tokens(backend, [text])[0] for backend in tiny)


def test_the_check_is_needed(tiny):
    stripped = "\u200b\u0301\ufffd"
    assert num_tokens(tiny[2], [stripped]) == [0]
    assert not has_content(stripped)
    assert reject_reason({"query": stripped, "positives": ["p"]}) is not None


@pytest.mark.parametrize("text", ["a", "7", "\u200b!", " €", "\u0301字", "🥰", "\x00é"])
def test_one_visible_character_is_enough(text):
    assert has_content(text)


@pytest.mark.parametrize(
    "text", ["", " \n", "\u200b", "\u0301", "\ufffd\ufffd", "\x00", "\xad", "\ue000"]
)
def test_what_can_vanish_is_no_content(text):
    assert not has_content(text)


@pytest.mark.assets
@pytest.mark.parametrize("reference", [MINILM, SMOLLM2], ids=["MiniLM", "SmolLM2"])
def test_every_visible_character_is_a_token_of_published_tokenizers(reference):
    folder = resolve_model(reference)
    backend = transformers.AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    every = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    visible = [character for character in every if has_content(character)]
    assert len(visible) > 140_000
    assert min(num_tokens(backend, visible)) > 0

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check(text):
        assert not has_content(text) or num_tokens(backend, [text])[0]

    check()
