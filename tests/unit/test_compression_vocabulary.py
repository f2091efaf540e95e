"""Smaller vocabularies: the same pieces and vectors of texts of kept tokens, for each tokenizer."""

import json
import random

import numpy as np
import pytest
import transformers
from tiny_folders import TINY, save_tiny
from tiny_models import (
    LINES,
    byte_level_tokenizer,
    metaspace_tokenizer,
    save_decoder,
    save_mistral_tokenizer,
    wordpiece_tokenizer,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from rayembed.errors import ConfigError
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.models.saving.export import read_compression
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.tokenizer_json import check_kind, kept_tokens, with_tokens
from rayembed_extras.compression.vocabulary import Vocabulary

TEXTS = ["Paris is the capital of France", "7 wonders of the world"]
OTHERS = ["are cats larger than dogs", "the quick brown fox jumps", "Zürich 北京 x"]


def unigram_tokenizer():
    """A tokenizer like that of XLM-R, with several ways to cut most words."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        [*LINES, *(" ".join(line.split()[::-1]) for line in LINES)] * 5,
        trainers.UnigramTrainer(
            vocab_size=130, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>"
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def of(pretrained):
    return pretrained.backend_tokenizer


TOKENIZERS = {
    "WordPiece": lambda folder: of(wordpiece_tokenizer()),
    "BPE": lambda folder: of(metaspace_tokenizer()),
    "BPE of bytes": lambda folder: of(byte_level_tokenizer()),
    "BPE with bytes for the unknown": lambda folder: Tokenizer.from_file(
        str(save_mistral_tokenizer(folder) / "tokenizer.json")
    ),
    "Unigram": lambda folder: unigram_tokenizer(),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_of_kept_tokens_have_the_same_pieces(kind, tmp_path):
    whole = TOKENIZERS[kind](tmp_path)
    content = json.loads(whole.to_str())
    met = list(dict.fromkeys(n for t in TEXTS for n in whole.encode(t).ids))
    kept = kept_tokens(content, met, set(), None)
    assert len(kept) < whole.get_vocab_size()
    small = Tokenizer.from_str(json.dumps(with_tokens(content, kept)))
    words = " ".join(LINES).split()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=3)) for _ in range(300)] + TEXTS
    same = 0
    names = set(small.get_vocab())
    for text in texts:
        before, after = whole.encode(text), small.encode(text)
        if set(before.tokens) <= names:
            assert after.tokens == before.tokens, text
            assert [kept[number] for number in after.ids] == before.ids
            same += 1
    assert 2 <= same < len(texts), "the control: other texts have lost tokens"
    unknown = [piece for piece in ("[UNK]", "<unk>") if piece in names]
    for text in [*texts, *OTHERS]:
        if not set(unknown) & set(whole.encode(text).tokens):
            assert not set(unknown) & set(small.encode(text).tokens), text


def test_a_size_keeps_the_most_frequent_tokens(tmp_path):
    whole = of(wordpiece_tokenizer())
    content = json.loads(whole.to_str())
    met = whole.encode("paris is the capital", add_special_tokens=False).ids
    least = kept_tokens(content, [], set(), None)
    assert kept_tokens(content, met, set(), len(least) + 1) == sorted({*least, met[0]})
    with pytest.raises(ConfigError, match=f"alone are {len(least)}"):
        kept_tokens(content, met, set(), 5)


@pytest.mark.parametrize("kind", TINY)
def test_every_architecture_gives_the_same_vectors_for_kept_tokens(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / "whole")
    texts = [CalibrationText(text, role) for text in TEXTS for role in ("query", "document")]
    way = Vocabulary()
    way.check(folder)
    told = way.compress(CompressionSource(folder, texts), tmp_path / "small")
    before, after = load_model(folder), load_model(tmp_path / "small")
    for role in ("query", "document"):
        vectors = [encode(model, TEXTS, role=role) for model in (before, after)]
        np.testing.assert_array_equal(*vectors)
    others = [encode(model, OTHERS[:2], role="document") for model in (before, after)]
    assert np.abs(others[0] - others[1]).max() > 1e-4, "the control: tokens that are gone"
    sizes = [sum(p.numel() for p in model.parameters()) for model in (before, after)]
    assert (told.weights, told.compressed) == (sizes[0], sizes[0] - sizes[1])
    assert told.compressed == told.by_part["embeddings"][1] > 0
    assert read_compression(tmp_path / "small")["settings"]["kind"] == "vocabulary"
    assert "matrices" not in read_compression(tmp_path / "small") or not told.matrices


def test_ids_in_settings_are_numbered_anew_and_sentence_transformers_reads_it(tmp_path):
    """A decoder whose special tokens stand behind the words."""
    folder = save_decoder(
        tmp_path / "decoder", tokenizer=byte_level_tokenizer(), eos_token_id=[0, 300]
    )
    Vocabulary().compress(
        CompressionSource(folder, [CalibrationText(t) for t in TEXTS]), tmp_path / "small"
    )
    model = load_model(tmp_path / "small")
    assert model.backbone.config.vocab_size == model.backbone.embed_tokens.num_embeddings < 320
    old = load_model(folder).backbone
    new = model.backbone.config.eos_token_id
    assert new[0] == 0
    assert (model.backbone.embed_tokens.weight[new[1]] == old.embed_tokens.weight[300]).all()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert tokenizer.eos_token == "<|end|>"
    assert len(tokenizer) == model.backbone.config.vocab_size


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="kind 'WordLevel'"):
        check_kind({"model": {"type": "WordLevel"}}, "backbone")
    marked = {"model": {"type": "BPE", "end_of_word_suffix": "</w>"}}
    with pytest.raises(ConfigError, match="end of words"):
        check_kind(marked, "backbone")


def test_without_texts_nothing_is_cut(tmp_path):
    folder = save_tiny("biencoder", tmp_path / "whole")
    with pytest.raises(ConfigError, match="no texts"):
        Vocabulary().compress(CompressionSource(folder), tmp_path / "small")
    assert not (tmp_path / "small").exists()
