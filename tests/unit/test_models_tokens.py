import pickle

import numpy as np
import pytest
from tiny_models import byte_level_tokenizer, metaspace_tokenizer, wordpiece_tokenizer

from rayembed.config.backbone import BackboneConfig
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.nvembed.tokens import NVEmbedTokenizer, ReleasedNVEmbedTokenizer
from rayembed.models.tokens import PrefixTokenizer, SpecialIds

BACKBONE = BackboneConfig(path="unused")
TASK = "Given a question, retrieve passages that answer it"


def nvembed(pretrained, config=None, **changes):
    settings = NVEmbedConfig(backbone=BACKBONE, **changes)
    released = settings.token_layout == "released"
    layout = ReleasedNVEmbedTokenizer if released else NVEmbedTokenizer
    return layout(pretrained, settings, SpecialIds(pretrained, config or {}))


def pooled(tokenizer, tokens):
    names = tokenizer.pretrained.convert_ids_to_tokens(tokens["input_ids"].tolist())
    return [n for n, kept in zip(names, tokens["pool_mask"], strict=True) if kept]


def test_instruction_is_out_and_the_token_with_its_trailing_space_is_in():
    tokenizer = nvembed(metaspace_tokenizer())
    (tokens,) = tokenizer(["are cats"], "query", [TASK])
    names = tokenizer.pretrained.convert_ids_to_tokens(tokens["input_ids"].tolist())
    assert names[0] == "<s>"
    assert names[-1] == "</s>"
    assert pooled(tokenizer, tokens)[0].startswith("▁a")
    assert "".join(pooled(tokenizer, tokens)) == "▁are▁cats</s>"
    assert tokens["input_ids"].dtype == np.int32
    assert tokens["pool_mask"].dtype == np.bool_


@pytest.mark.parametrize("layout", ["paper", "released"])
def test_a_template_without_a_space_leaves_its_last_token_to_the_released_layout(layout):
    # It counts the instruction's own tokens, and BOS takes the place of one.
    template = "Instruct: {instruction}\nQuery: "
    spaced, short = (
        nvembed(metaspace_tokenizer(), instruction_template=t, token_layout=layout)
        for t in (template, template[:-1])
    )
    (with_space,), (without,) = (
        tokenizer([text], "query", [TASK])
        for tokenizer, text in ((spaced, "are cats"), (short, " are cats"))
    )
    assert with_space["input_ids"].tolist() == without["input_ids"].tolist()
    assert "".join(pooled(spaced, with_space)) == "▁are▁cats</s>"
    wrong = without["pool_mask"] != with_space["pool_mask"]
    assert wrong.sum() == (layout == "released")
    assert pooled(short, without)[0].endswith("▁are" if layout == "paper" else ":")


@pytest.mark.parametrize(("layout", "expected"), [("paper", "ñ"), ("released", "▁ñ")])
def test_a_lone_space_is_in_the_released_pool_alone(layout, expected):
    tokenizer = nvembed(metaspace_tokenizer(), token_layout=layout)
    told, plain = tokenizer(["ñ are", "ñ are"], "query", [TASK, ""])
    told_names = "".join(pooled(tokenizer, told)).replace("<unk>", "ñ")
    assert told_names == f"{expected}▁are</s>"
    assert plain["pool_mask"].all()


@pytest.mark.parametrize("text", ["are cats", "7 wonders", " are", "é🙂 where", "Query: are"])
def test_byte_level_pool_spells_the_text(text):
    tokenizer = nvembed(byte_level_tokenizer())
    (tokens,) = tokenizer([text], "query", [TASK])
    kept = tokens["input_ids"][tokens["pool_mask"]]
    assert tokenizer.pretrained.decode(kept).strip() == f"{text}<|end|>".strip()
    assert len(kept) < len(tokens["input_ids"])


def test_document_without_instruction_pools_bos_and_eos():
    tokenizer = nvembed(metaspace_tokenizer())
    (tokens,) = tokenizer(["are cats"], "document")
    assert tokens["pool_mask"].all()
    assert tokens["input_ids"][0] == 1
    assert tokens["input_ids"][-1] == 2


def test_bos_is_not_doubled_and_literal_ids_are_laid_out():
    with_bos, without = nvembed(metaspace_tokenizer(add_bos=True)), nvembed(metaspace_tokenizer())
    (one,), (two,) = with_bos(["are cats"], "document"), without(["are cats"], "document")
    assert one["input_ids"].tolist() == two["input_ids"].tolist()
    assert (one["input_ids"] == 1).sum() == 1


def test_ids_come_from_the_model_where_the_tokenizer_names_none():
    tokenizer = nvembed(byte_level_tokenizer(), {"bos_token_id": 5, "eos_token_id": [7, 8]})
    (tokens,) = tokenizer(["are"], "document")
    assert tokens["input_ids"][0] == 5  # the tokenizer has no BOS
    assert tokens["input_ids"][-1] == 0  # but an EOS of its own
    no_eos = metaspace_tokenizer()
    no_eos.eos_token = None
    assert nvembed(no_eos, {"eos_token_id": [7, 8]}).pad_id == 7
    with pytest.raises(ArtifactError, match="end-of-text"):
        nvembed(no_eos)


def test_truncation_takes_the_texts_end_and_keeps_eos():
    tokenizer = nvembed(metaspace_tokenizer(), query_max_length=8, document_max_length=6)
    text = "the quick brown fox jumps over the lazy dog"
    (query,), (document,) = tokenizer([text], "query"), tokenizer([text], "document")
    (whole,) = nvembed(metaspace_tokenizer())([text], "query")
    assert query["input_ids"].tolist() == [*whole["input_ids"][:7], 2]
    assert document["input_ids"].tolist() == [*whole["input_ids"][:5], 2]


def test_the_released_layout_has_a_token_for_eos_in_a_text_that_is_too_long():
    lengths = {"query_max_length": 8, "document_max_length": 6, "token_layout": "released"}
    tokenizer = nvembed(metaspace_tokenizer(), **lengths)
    text = "the quick brown fox jumps over the lazy dog"
    (query,), (document,) = tokenizer([text], "query"), tokenizer([text], "document")
    (whole,) = nvembed(metaspace_tokenizer())([text], "query")
    assert query["input_ids"].tolist() == whole["input_ids"][:8].tolist()
    assert document["input_ids"].tolist() == whole["input_ids"][:6].tolist()
    tokenizer.max_lengths = {"query": len(whole["input_ids"]), "document": 6}
    (fits,) = tokenizer([text], "query")
    assert fits["input_ids"].tolist() == whole["input_ids"].tolist()


def test_an_instruction_that_fills_the_released_length_is_refused():
    head = nvembed(metaspace_tokenizer()).prompt(TASK)
    taken = 1 + nvembed(metaspace_tokenizer()).num_prompt_tokens(head)
    released = {"token_layout": "released"}
    tokenizer = nvembed(metaspace_tokenizer(), query_max_length=taken + 1, **released)
    (tokens,) = tokenizer(["ñ"], "query", [TASK])
    assert "".join(pooled(tokenizer, tokens)) == "▁<unk>"
    # Where a text is one token with the space before it, one position less does.
    for length, text in ((taken, "ñ"), (taken - 1, "are"), (taken - 1, "")):
        tokenizer = nvembed(metaspace_tokenizer(), query_max_length=length, **released)
        with pytest.raises(DataError, match=f"none of query_max_length {length} for the text"):
            tokenizer([text], "query", [TASK], allow_empty=True)


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_text_without_tokens_is_refused_or_let_through(text):
    tokenizer = nvembed(metaspace_tokenizer())
    with pytest.raises(DataError, match=r"document .* no tokens of its own"):
        tokenizer(["are", text], "document")
    with pytest.raises(DataError, match="no tokens of its own"):
        tokenizer([text], "query", [TASK])
    (tokens,) = tokenizer([""], "document", allow_empty=True)
    assert tokens["input_ids"].tolist() == [1, 2]
    (tokens,) = tokenizer([""], "query", [TASK], allow_empty=True)
    assert pooled(tokenizer, tokens) == ["</s>"]


def test_instruction_that_fills_the_length_is_refused():
    tokenizer = nvembed(metaspace_tokenizer(), query_max_length=10)
    with pytest.raises(DataError, match=r"leaves none of query_max_length 10 for the text 'are'"):
        tokenizer(["are"], "query", [TASK])
    with pytest.raises(ConfigError, match="query_max_length is 2"):
        nvembed(metaspace_tokenizer(), query_max_length=2)


def test_instruction_with_braces_is_taken_literally():
    tokenizer = nvembed(metaspace_tokenizer())
    assert tokenizer.prompt("find {x} {0}") == "Instruct: find {x} {0}\nQuery: "


def test_collate_pads_right():
    tokenizer = nvembed(metaspace_tokenizer())
    tokens = tokenizer(["are cats larger", "dog"], "query", ["", TASK])
    batch = tokenizer.collate(tokens)
    lengths = [len(t["input_ids"]) for t in tokens]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["input_ids"].dtype.is_signed
    for row, one in enumerate(tokens):
        assert batch["input_ids"][row, : lengths[row]].tolist() == one["input_ids"].tolist()
        assert batch["pool_mask"][row, : lengths[row]].tolist() == one["pool_mask"].tolist()
    assert not batch["pool_mask"][0, lengths[0] :].any()
    assert (batch["input_ids"][0, lengths[0] :] == 2).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nvembed(metaspace_tokenizer()),
        lambda: nvembed(metaspace_tokenizer(), token_layout="released"),
        lambda: PrefixTokenizer(
            wordpiece_tokenizer(), BiEncoderConfig(backbone=BACKBONE, query_prefix="the ")
        ),
    ],
)
def test_tokenizer_survives_pickling(make):
    tokenizer = make()
    again = pickle.loads(pickle.dumps(tokenizer))
    for one, two in zip(
        tokenizer(["are cats", "dog"], "query", [TASK, ""]),
        again(["are cats", "dog"], "query", [TASK, ""]),
        strict=True,
    ):
        assert one["input_ids"].tolist() == two["input_ids"].tolist()
        assert one["pool_mask"].tolist() == two["pool_mask"].tolist()


def test_biencoder_tokens_are_the_tokenizers_own():
    pretrained = wordpiece_tokenizer()
    # As in the published all-MiniLM-L6-v2.
    pretrained.backend_tokenizer.enable_truncation(4)
    pretrained.backend_tokenizer.enable_padding(length=16)
    config = BiEncoderConfig(
        backbone=BACKBONE, query_prefix="where ", query_max_length=6, document_max_length=20
    )
    tokenizer = PrefixTokenizer(pretrained, config)
    text = "Paris is the capital of France"
    (query,), (document,) = tokenizer([text], "query"), tokenizer([text], "document")
    expected = pretrained(f"where {text}", truncation=True, max_length=6)["input_ids"]
    assert query["input_ids"].tolist() == expected
    assert document["input_ids"].tolist() == pretrained(text)["input_ids"]
    assert query["pool_mask"].all()
    (told,) = tokenizer([text], "document", ["the capital"])
    assert told["input_ids"].tolist() == pretrained(f"the capital {text}")["input_ids"]
    with pytest.raises(DataError, match="no tokens of its own"):
        tokenizer(["\u200b"], "query")  # the normaliser drops it, the prefix stays
