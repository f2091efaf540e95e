"""CDE: what context may change and what not, the corpus as an object, saved folders."""

import logging

import pytest
import torch
import transformers
from tiny_models import (
    decoder_config,
    save_cde_stages,
    save_encoder,
    save_modern_encoder,
    save_nomic_encoder,
    wordpiece_tokenizer,
)

from rayembed.config.settings import parse
from rayembed.errors import ConfigError, DataError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.load import load_model

SAVE = {"bert": save_encoder, "nomic_bert": save_nomic_encoder, "modernbert": save_modern_encoder}
TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "paris"]
J = 12
"""More context documents than the window of the tiny ModernBERT holds."""


def settings(**changes):
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": J,
        "num_soft_prompts": 2,
        "output": "residual",
        "query_max_length": 32,
        "document_max_length": 32,
    }
    return parse(CDEConfig, config | changes)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    return {family: save_cde_stages(folder / family, save) for family, save in SAVE.items()}


@pytest.fixture(params=SAVE)
def model(stages, request):
    return build_model(settings(), stages[request.param], seed=5).eval()


def collated(model, texts, role="query"):
    return model.tokenizer.collate(model.tokenizer(texts, role))


def context_of(rows, seed=0):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def distance(left, right):
    return (left - right).abs().max().item()


@torch.no_grad()
def test_the_order_of_context_is_nothing_and_that_of_text_is_something(model):
    context = context_of(J)
    batch = collated(model, TEXTS)
    found = model(batch, context).embeddings
    assert distance(model(batch, context.flip(0)).embeddings, found) < 1e-5
    assert distance(model(batch, context_of(J, seed=1)).embeddings, found) > 1e-2
    turned = dict(batch)
    turned["input_ids"] = batch["input_ids"].clone()
    turned["input_ids"][2, 1:4] = batch["input_ids"][2, 1:4].flip(0)
    assert distance(model(turned, context).embeddings[2], found[2]) > 1e-3


@torch.no_grad()
def test_counted_positions_give_context_an_order(stages):
    model = build_model(settings(context_positions="counted"), stages["nomic_bert"], seed=5).eval()
    batch, context = collated(model, TEXTS), context_of(J)
    found = model(batch, context).embeddings
    assert distance(model(batch, context.flip(0)).embeddings, found) > 1e-3


@torch.no_grad()
def test_what_lacks_is_the_null_token_and_texts_keep_their_positions(model):
    batch, context, null = collated(model, TEXTS), context_of(3), model.layers.null
    filled = torch.cat([context, null.expand(J - 3, -1)])
    found = model(batch, context).embeddings
    assert distance(model(batch, filled).embeddings, found) == 0
    assert distance(model(batch, torch.cat([context, context])).embeddings, found) > 1e-3


@torch.no_grad()
def test_padding_changes_nothing(model):
    context = context_of(J)
    together = model(collated(model, TEXTS), context).embeddings
    alone = torch.cat([model(collated(model, [t]), context).embeddings for t in TEXTS])
    assert distance(alone, together) < 1e-5
    documents = model.embed_context(collated(model, TEXTS, "document"))
    one = torch.cat([model.embed_context(collated(model, [t], "document")) for t in TEXTS])
    assert distance(one, documents) < 1e-5


@torch.no_grad()
def test_the_mean_never_takes_in_context(model):
    """States at places of context are replaced; the control pools them and changes."""
    batch, context = collated(model, TEXTS), context_of(J)

    def spoiled(_module, _inputs, output):
        output.last_hidden_state[:, : model.added_tokens] = 100.0

    found = model(batch, context).embeddings
    handle = model.backbone.register_forward_hook(spoiled)
    assert distance(model(batch, context).embeddings, found) == 0
    model.config = model.config.model_copy(update={"pool_context": True})
    assert distance(model(batch, context).embeddings, found) > 1e-2
    handle.remove()


def test_sequence_dropout_puts_the_null_token_in_its_share_of_places_in_training(stages):
    model = build_model(settings(sequence_dropout=0.25), stages["bert"], seed=5)
    context = context_of(J)
    torch.manual_seed(1)
    tokens = model._context_tokens(context, 400)
    dropped = (tokens == model.layers.null).all(-1)
    assert torch.equal(tokens[~dropped], context.expand(400, -1, -1)[~dropped])
    assert 0.22 < dropped.float().mean() < 0.28
    assert 0 < dropped[0].sum() < J
    assert not torch.equal(dropped[0], dropped[1]), "drawn for each text"
    assert not (model.eval()._context_tokens(context, 400) == model.layers.null).all(-1).any()


@torch.no_grad()
def test_a_corpus_that_is_set_is_the_context_and_is_saved(model, tmp_path, caplog):
    batch, context = collated(model, TEXTS), context_of(5)
    with caplog.at_level(logging.WARNING, logger="rayembed"):
        without = model(batch).embeddings
        assert distance(model(batch, context[:0]).embeddings, without) == 0
        model(batch)
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert "no corpus is set" in caplog.text
    model.set_corpus(context)
    found = model(batch).embeddings
    assert distance(found, without) > 1e-3
    assert distance(model(batch, context).embeddings, found) == 0
    model.save(tmp_path / "saved")
    caplog.clear()
    again = load_model(tmp_path / "saved")
    assert torch.equal(again.corpus, context)
    assert distance(again(batch).embeddings, found) == 0
    assert not caplog.records
    again.set_corpus(None)
    assert distance(again(batch).embeddings, without) == 0


@pytest.mark.parametrize("shape", [(J + 1, 32), (3, 31), (32,)])
def test_context_of_another_shape_is_refused(stages, shape):
    model = build_model(settings(), stages["bert"], seed=5)
    with pytest.raises(DataError, match=r"at most 12 vectors of width 32"):
        model.set_corpus(torch.zeros(shape))
    with pytest.raises(DataError, match=r"model\.num_context"):
        model(collated(model, TEXTS), torch.zeros(shape))


def test_an_instruction_stands_in_place_of_the_prefix(stages):
    model = build_model(settings(pool_instruction=False), stages["bert"], seed=5)
    assert model.tokenizer.prompt("", "query") == "search_query: "
    assert model.tokenizer.prompt("", "document") == "search_document: "
    assert model.tokenizer.prompt("classification: ", "query") == "classification: "
    (tokens,) = model.tokenizer(["paris"], "query")
    assert tokens["pool_mask"].sum() == 2, "the text's one token and [SEP]"


def test_stages_of_other_vocabularies_are_refused(tmp_path):
    save_cde_stages(tmp_path)
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "first")
    folders = {"backbone": tmp_path / "second", "encoder": tmp_path / "first"}
    with pytest.raises(ConfigError, match="different vocabularies"):
        check_buildable(settings(), folders)


def refusal_of(config, folder, **changes):
    """What is said of a tiny model of another family as both stages: by check and build alike."""
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    wordpiece_tokenizer().save_pretrained(folder)
    parts = {"backbone": folder, "encoder": folder}
    errors = []
    for make in (check_buildable, lambda c, f: build_model(c, f, seed=0)):
        with pytest.raises(ConfigError) as error:
            make(settings(**changes), parts)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    return errors[0]


def test_what_cannot_be_a_stage_is_refused_without_weights_and_with(stages, tmp_path):
    sizes = {"vocab_size": 200, "num_hidden_layers": 1, "num_attention_heads": 4}
    narrow = transformers.ElectraConfig(
        embedding_size=16, hidden_size=32, intermediate_size=48, **sizes
    )
    told = refusal_of(narrow, tmp_path / "electra")
    assert "word embeddings are 16 wide and its hidden states 32" in told
    gpt2 = transformers.GPT2Config(vocab_size=200, n_embd=32, n_layer=1, n_head=4)
    assert "attention is causal" in refusal_of(gpt2, tmp_path / "gpt2")
    assert "attention is causal" in refusal_of(
        decoder_config("llama", vocab_size=200), tmp_path / "llama"
    )
    check_buildable(settings(normalize_twice=True), stages["modernbert"])
    for family in ("bert", "nomic_bert"):
        with pytest.raises(ConfigError, match="twice; set it to false"):
            check_buildable(settings(normalize_twice=True), stages[family])


def test_a_context_of_other_type_is_taken(model):
    """As `encode_context` gives it, float32 on the CPU, beside weights in another type."""
    batch = collated(model.to(torch.bfloat16), TEXTS)
    context = context_of(4)
    found = model(batch, context).embeddings
    assert distance(found, model(batch, context.bfloat16()).embeddings) == 0


def test_learnt_positions_bound_the_text_and_counted_ones_the_context_too(stages):
    check_buildable(settings(query_max_length=64), stages["bert"])
    with pytest.raises(ConfigError, match=r"query_max_length is 65.* learnt only 64 positions"):
        check_buildable(settings(query_max_length=65), stages["bert"])
    with pytest.raises(ConfigError, match=r"take 14 of them; set it to at most 50"):
        check_buildable(settings(query_max_length=64, context_positions="counted"), stages["bert"])
